"""What published models keep: counts and bytes, worked out from their configurations and model cards.

Bytes are of one sequence with bfloat16 caches on one chip. The files of data/configs name their sources.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

CONFIGS = Path(__file__).parent / "data" / "configs"


class Row(NamedTuple):
    """caches: counts by kind. kv_bytes: of one token in full and latent layers. state_bytes: with bfloat16
    states.
    window_bytes: once the sequence is past the window. own_state_bytes: with the states' own dtypes, where
    that differs.
    """

    caches: str
    kv_bytes: int
    state_bytes: int
    window_bytes: int
    own_state_bytes: int | None = None


PUBLISHED = {
    "baichuan-m1-14b": Row("20 full + 40 state + 20 swa8192", 40_960, 122_880, 671_088_640),
    "bamba-9b": Row("29 state + 3 full", 12_288, 62_287_360, 0),
    "command-a": Row("48 swa4096 + 16 full", 65_536, 0, 805_306_368),
    "command-r7b": Row("24 swa4096 + 8 full", 32_768, 0, 402_653_184),
    "deepseek-v3.2": Row("122 mla", 78_324, 0, 0),
    "deepseek-v3": Row("61 mla", 70_272, 0, 0),
    "exaone-4.0-32b": Row("48 swa4096 + 16 full", 65_536, 0, 805_306_368),
    "falcon-h1-34b": Row("72 full + 72 state", 147_456, 153_206_784, 0),
    "falcon-h1-7b": Row("44 full + 44 state", 45_056, 70_152_192, 0),
    "falcon-h1-tiny-90m": Row("24 full + 24 state", 12_288, 2_488_320, 0),
    "gemma-2-27b": Row("23 swa4096 + 23 full", 188_416, 0, 771_751_936),
    "gemma-2-2b": Row("13 swa4096 + 13 full", 53_248, 0, 218_103_808),
    "gemma-2-9b": Row("21 swa4096 + 21 full", 172_032, 0, 704_643_072),
    "gemma-3-12b": Row("40 swa1024 + 8 full", 65_536, 0, 335_544_320),
    "gemma-3-1b": Row("22 swa512 + 4 full", 4_096, 0, 11_534_336),
    "gemma-3-270m": Row("15 swa512 + 3 full", 3_072, 0, 7_864_320),
    "gemma-3-27b": Row("52 swa1024 + 10 full", 81_920, 0, 436_207_616),
    "gemma-3-4b": Row("29 swa1024 + 5 full", 20_480, 0, 121_634_816),
    "gemma-3n-e2b": Row("16 swa512 + 4 full", 8_192, 0, 16_777_216),
    "gemma-3n-e4b": Row("16 swa512 + 4 full", 8_192, 0, 16_777_216),
    "gemma-4-26b-a4b": Row("25 swa1024 + 5 full", 20_480, 0, 209_715_200),
    "gemma-4-31b": Row("50 swa1024 + 10 full", 81_920, 0, 838_860_800),
    "gemma-4-e2b": Row("12 swa512 + 3 full", 6_144, 0, 6_291_456),
    "glm-5.2": Row("99 mla", 92_628, 0, 0),
    "glm-5": Row("156 mla", 100_152, 0, 0),
    "gpt-oss-120b": Row("18 swa128 + 18 full", 36_864, 0, 4_718_592),
    "gpt-oss-20b": Row("12 swa128 + 12 full", 24_576, 0, 3_145_728),
    "granite-4.0-h-micro": Row("36 state + 4 full", 8_192, 38_688_768, 0),
    "granite-4.0-h-small": Row("36 state + 4 full", 16_384, 77_322_240, 0),
    "granite-4.0-h-tiny": Row("36 state + 4 full", 8_192, 29_030_400, 0),
    "inkling-2-small": Row("40 swa1024 + 48 state + 8 full", 32_768, 3_244_032, 167_772_160),
    "jamba-1.5-large": Row("63 state + 9 full", 36_864, 39_223_296, 0),
    "jamba-1.5-mini": Row("28 state + 4 full", 16_384, 8_716_288, 0),
    "jamba-reasoning-3b": Row("26 state + 2 full", 1_024, 5_058_560, 0),
    "jamba-v0.1": Row("28 state + 4 full", 16_384, 8_716_288, 0),
    "kimi-k3": Row("69 state + 24 mla", 27_648, 232_316_928, 0, 449_372_160),
    "kimi-linear-48b-a3b": Row("20 state + 7 mla", 8_064, 22_446_080, 0, 43_417_600),
    "lara-4-mini": Row("14 state + 13 swa512 + 7 full", 14_336, 7_684_096, 13_631_488),
    "lfm2-1.2b": Row("10 state + 6 full", 12_288, 81_920, 0),
    "lfm2-8b-a1b": Row("18 state + 6 full", 12_288, 147_456, 0),
    "lfm3-1.7b": Row("13 state + 6 full + 5 swa256", 12_288, 319_488, 2_621_440),
    "ling-3.0-flash": Row("35 state + 7 mla", 8_064, 39_280_640, 0, 75_980_800),
    "llama-4-maverick": Row("36 chunk8192 + 12 full", 49_152, 0, 1_207_959_552),
    "llama-4-scout": Row("36 chunk8192 + 12 full", 49_152, 0, 1_207_959_552),
    "mamba-codestral-7b": Row("64 state", 0, 138_149_888, 0),
    "mimo-v2-flash": Row("9 full + 39 swa128", 23_040, 0, 25_559_040),
    "minimax-text-01": Row("70 state + 10 full", 40_960, 146_800_640, 0),
    "mistral-7b-v0.1": Row("32 swa4096", 0, 0, 536_870_912),
    "nemotron-3-nano-30b-a3b": Row("23 state + 6 full", 6_144, 24_965_120, 0, 49_082_368),
    "nemotron-3-super-120b-a12b": Row("40 state + 8 full", 8_192, 86_343_680, 0, 170_229_760),
    "nemotron-h-56b": Row("54 state + 10 full", 40_960, 459_620_352, 0, 912_605_184),
    "nemotron-h-8b": Row("24 state + 4 full", 16_384, 51_806_208, 0, 102_137_856),
    "nemotron-nano-9b-v2": Row("27 state + 4 full", 16_384, 72_769_536, 0, 143_548_416),
    "olmo-3-7b": Row("24 swa4096 + 8 full", 131_072, 0, 1_610_612_736),
    "olmo-hybrid-7b": Row("24 state + 8 full", 122_880, 28_200_960, 0),
    "phi-4-mini-flash": Row("9 state + 8 swa512 + 1 full", 5_120, 1_751_040, 20_971_520),
    "qwen3-next-80b-a3b": Row("36 state + 12 full", 24_576, 39_518_208, 0),
    "qwen3.5-122b-a10b": Row("36 state + 12 full", 24_576, 78_151_680, 0, 153_649_152),
    "qwen3.5-27b": Row("48 state + 16 full", 65_536, 78_446_592, 0, 153_944_064),
    "qwen3.5-35b-a3b": Row("30 state + 10 full", 20_480, 32_931_840, 0, 64_389_120),
    "qwen3.5-397b-a17b": Row("45 state + 15 full", 30_720, 97_689_600, 0, 192_061_440),
    "qwen3.5-9b": Row("24 state + 8 full", 32_768, 26_345_472, 0, 51_511_296),
    "recurrentgemma-2b": Row("18 state + 8 swa2048", 0, 368_640, 16_777_216, 460_800),
    "step-3.7-flash": Row("12 full + 33 swa512", 49_152, 0, 69_206_016),
    "trinity-nano": Row("42 swa2048 + 14 full", 14_336, 0, 88_080_384),
    "zamba2-2.7b": Row("54 state + 9 full", 184_320, 37_089_792, 0),
    "zamba2-7b": Row("81 state + 13 full", 372_736, 77_925_888, 0),
}

NOT_MODELLED = {
    "deepseek-v4-flash": "compresses keys 4 or 128 times",
    "minimax-m3": "block-sparse indexers",
    "zaya1-8b": "convolution states inside its attention",
}


def read(name: str) -> dict[str, Any]:
    """The configuration of that name."""
    return json.loads((CONFIGS / f"{name}.json").read_text())
