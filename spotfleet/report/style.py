"""Style sheet of all reports. Colours after Okabe and Ito, so that readers with colour blindness can distinguish them;
each also has its own shape."""

from __future__ import annotations

_LIGHT = """--ground:#fff;--panel:#f6f7f9;--ink:#1a1d21;--soft:#5a626c;--rule:#d9dde2;--grid:#e8ebee;--spot:#0072b2;
--ondemand:#d98200;--ondemand-ground:#fbe6c4;--wasted:#c8500a;--around:#7b8794;--mark:#b3000f;--first:#0072b2;
--second:#d98200;--third:#008060;--fourth:#a3457f;--fill:.16;--solid:1;--note:#fff6df;--note-rule:#d9a400"""
_DARK = """--ground:#15181c;--panel:#1e2227;--ink:#eceff2;--soft:#a4adb8;--rule:#3a4149;--grid:#2b3138;--spot:#56b4e9;
--ondemand:#f0a830;--ondemand-ground:#4a3a1c;--wasted:#f07a3c;--around:#8f9aa6;--mark:#ff6b6b;--first:#56b4e9;
--second:#f0a830;--third:#2fc39a;--fourth:#dc8fbd;--fill:.22;--solid:.72;--note:#33290f;--note-rule:#b98e1a"""

STYLE = (":root{color-scheme:light dark;" + _LIGHT + "}\n@media (prefers-color-scheme:dark){:root{" + _DARK + "}}\n"
         "@media print{:root{color-scheme:light;" + _LIGHT + "}}\n" + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",
Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:anywhere}
main{max-width:60rem;margin:0 auto;padding:2.5rem 1.25rem 3rem}
header{margin-bottom:2rem}
.kicker{margin:0;color:var(--soft);font-size:.875rem}
h1{margin:.1rem 0 .6rem;font-size:1.9rem;line-height:1.2;font-weight:680;letter-spacing:-.01em}
h2{margin:0 0 .25rem;font-size:1.25rem;line-height:1.3;font-weight:640}
h3{margin:1rem 0 .1rem;font-size:.95rem;font-weight:600}
.lead{margin:0 0 .4rem;font-size:1.2rem;line-height:1.45;max-width:46rem}
.more,.says{margin:0 0 .4rem;color:var(--soft);max-width:46rem}
.says{margin-bottom:.9rem}
section{margin:2.6rem 0 0;padding-top:1.5rem;border-top:1px solid var(--rule)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(10.5rem,1fr));gap:.75rem;margin:1.4rem 0 0}
.tile{background:var(--panel);border-radius:.5rem;padding:.8rem 1rem}
.tile dt{color:var(--soft);font-size:.85rem}
.tile dd{margin:0;font-size:1.55rem;font-weight:640;line-height:1.3;font-variant-numeric:tabular-nums}
.tile small{display:block;font-size:.8rem;font-weight:400;color:var(--soft);line-height:1.35}
figure{margin:0 0 1rem}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.4rem;list-style:none;margin:0 0 .3rem;padding:0;font-size:.875rem}
.legend li{display:flex;align-items:center;gap:.5rem;min-width:0}
.legend b{font-weight:640;font-variant-numeric:tabular-nums;white-space:nowrap}
.swatch{width:26px;height:14px;flex:none;overflow:hidden}
svg.chart{display:block;width:100%;height:auto}
svg.narrow{display:none}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;fill:var(--soft);
font-variant-numeric:tabular-nums}
.grid{stroke:var(--grid)}
.axis{stroke:var(--rule)}
.line{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke:var(--spot)}
.line.ondemand{stroke:var(--ondemand);stroke-dasharray:7 4}
.line.plain{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:2 3}
.line.second{stroke:var(--second);stroke-dasharray:9 4}
.line.third{stroke:var(--third);stroke-dasharray:3 3}
.line.fourth{stroke:var(--fourth);stroke-dasharray:10 3 2 3}
.area{fill:var(--spot);opacity:var(--fill)}
.area.ondemand{fill:var(--ondemand)}
.band:not(.ondemand){fill:var(--spot)}
.band:not(.ondemand){fill-opacity:var(--solid)}
.band.useful:not(.ondemand){fill:var(--third)}
.band.wasted:not(.ondemand){fill:var(--wasted)}
.band.around:not(.ondemand){fill:var(--around)}
.band.second:not(.ondemand){fill:var(--second)}
.band.third:not(.ondemand){fill:var(--third)}
.band.fourth:not(.ondemand){fill:var(--fourth)}
path.band.ondemand{stroke:var(--ondemand);stroke-width:.8}
.hatch-ground{fill:var(--ondemand-ground)}
.hatch-line{stroke:var(--ondemand);stroke-width:1.6}
.mark{fill:var(--mark)}
.mark-halo{stroke:var(--ground);stroke-width:3;opacity:.75}
.mark-line{stroke:var(--mark);stroke-width:1.1;stroke-dasharray:3 3}
.bar{display:block;width:100%;height:1.05rem;border-radius:2px}
.whisker{stroke:var(--ink);stroke-width:1.2;vector-effect:non-scaling-stroke}
.bar-ground{fill:var(--panel)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{padding:.38rem .7rem .38rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid);
overflow-wrap:normal}
tr>:last-child{padding-right:0}
thead th{color:var(--soft);font-weight:500;border-bottom-color:var(--rule);vertical-align:bottom}
tbody th{font-weight:500;overflow-wrap:anywhere;min-width:4.5rem}
tfoot th,tfoot td{font-weight:640;border-bottom:0;border-top:1px solid var(--rule)}
.number{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.bars th{width:34%}
.bars .name{display:block}
.bars small{color:var(--soft);font-weight:400;font-size:.8rem;line-height:1.3;display:block}
.wide-cell{width:42%;vertical-align:middle}
summary{cursor:pointer;color:var(--soft)}
.words dt{font-weight:600;margin-top:.6rem}
.words dd{margin:0;color:var(--soft);max-width:46rem}
.note{background:var(--note);border-left:4px solid var(--note-rule);padding:.7rem 1rem;margin:1.2rem 0;
border-radius:.25rem}
.note p{margin:.2rem 0}
.pools{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr));gap:0 2rem}
.pools figure{max-width:34rem}
footer{margin-top:2.5rem;color:var(--soft);font-size:.85rem}
@media (max-width:640px){
main{padding:1.4rem .9rem 2rem}
tbody th{min-width:8.5rem}
h1{font-size:1.5rem}.lead{font-size:1.08rem}
svg.wide{display:none}svg.narrow{display:block}
.tiles{grid-template-columns:1fr 1fr;gap:.5rem}.tile{padding:.6rem .7rem}.tile dd{font-size:1.25rem}
.bars tr{display:grid;grid-template-columns:1fr auto auto;border-bottom:1px solid var(--grid)}
.bars tr>*{border:0;width:auto}
.bars.four tr{grid-template-columns:1fr auto auto auto}
.bars .wide-cell{grid-column:1/-1;order:1;padding:0 0 .5rem}.bars td:empty{display:none}
}
@media print{
body{font-size:11pt}main{max-width:none;padding:0}
section{break-inside:auto}figure,tr,.tile{break-inside:avoid}h2,h3,.says{break-after:avoid}
svg{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.tile{border:1px solid var(--rule)}.scroll{overflow:visible}table{font-size:.75rem}td{overflow-wrap:anywhere}
}
""")
