"""The style sheet of the page that `jaxkv plan --html` writes: light and dark, nothing loaded."""

STYLE = """\
:root {
  --ink: #1c2430; --soft: #5d6877; --back: #ffffff; --card: #f4f6f9; --line: #d9dee6;
  --full: #2f6fde; --window: #17a398; --chunk: #8a5cd6; --state: #e08a1e; --other: #8b95a3;
  --needed: #9db4d3; --slots: #d64550; --padding: #f0803c; --tail: #f2c14e; --reach: #7a4b2a; --reserved:
  #b9a3e3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e7ebf1; --soft: #9aa6b6; --back: #12161d; --card: #1b212b; --line: #333c4a;
    --needed: #4d6386; --full: #5b8ff0;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 940px; margin: 0 auto; padding: 36px 24px 56px; }
main + main { border-top: 1px solid var(--line); }
h1 { margin: 0 0 4px; font-size: 30px; letter-spacing: -0.02em; }
h2 { margin: 40px 0 10px; font-size: 19px; }
h3 { margin: 20px 0 8px; font-size: 14px; color: var(--soft); font-weight: 600; }
.lead { margin: 0 0 20px; color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(135px, 1fr)); gap: 10px; }
.tiles div { background: var(--card); border-radius: 10px; padding: 12px 14px; }
.tiles b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: 12.5px; }
.pair { margin-bottom: 16px; display: grid; grid-template-columns: repeat(auto-fit, minmax(390px, 1fr));
gap: 16px; } figure { margin: 0; background: var(--card); border-radius: 10px; padding: 12px 8px 4px; }
figcaption { font-weight: 600; padding: 0 10px 4px; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font-size: 12px; font-variant-numeric: tabular-nums; }
svg text.note { fill: var(--soft); font-size: 11.5px; }
.grid { stroke: var(--line); stroke-width: 1; }
.k-full { fill: var(--full); background: var(--full); }
.k-window { fill: var(--window); background: var(--window); }
.k-chunk { fill: var(--chunk); background: var(--chunk); }
.k-state { fill: var(--state); background: var(--state); }
.k-other { fill: var(--other); background: var(--other); }
.pad { fill: url(#hatch); }
.hatch-back { fill: var(--card); }
.hatch-line { stroke: var(--slots); stroke-width: 2; }
.empty { fill: none; stroke: var(--slots); stroke-width: 1.2; stroke-dasharray: 4 3; }
polyline.need { fill: none; stroke: var(--ink); stroke-width: 1.6; stroke-dasharray: 5 4; }
i.need { width: 24px !important; border-top: 2px dashed var(--ink); height: 0; align-self: center; }
.c-needed { fill: var(--needed); background: var(--needed); }
.c-padding_layers { fill: var(--slots); background: var(--slots); }
.c-page_padding { fill: var(--padding); background: var(--padding); }
.c-block_tail { fill: var(--tail); background: var(--tail); }
.c-out_of_reach { fill: var(--reach); background: var(--reach); }
.c-reserved_states { fill: var(--reserved); background: var(--reserved); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 0 0 10px; padding: 0;
  color: var(--soft); font-size: 13px; }
.legend li { display: flex; align-items: center; gap: 6px; }
.legend i { width: 14px; height: 11px; border-radius: 2px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); }
th, td { padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); }
thead th { color: var(--ink); font-weight: 600; }
.sr { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
"""
