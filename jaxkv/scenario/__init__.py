"""Cache decisions as JSON: one file states a cache and what happens to it, the answer says what was decided.

No model and no accelerator take part, so that a wrong decision can be reported as one small file.
"""
