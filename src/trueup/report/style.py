"""The style sheet. Colours are Okabe and Ito's, which colour-blind readers tell apart, in a light and a dark tuning."""

_LIGHT = """
--paper:#fff;--sheet:#f6f7f9;--ink:#1b1f24;--faint:#5b6470;--rule:#d9dee4;--grid:#e8ebef;
--c0:#0072b2;--c1:#d55e00;--c2:#00795a;--c3:#a8457f;--ok:#00795a;--look:#8a5a00;--fault:#b8320a;--limit:#b8320a;
--plus:222,104,10;--minus:56,150,215;--strong:#0c0f13;color-scheme:light;
"""
_DARK = """
--paper:#14171b;--sheet:#1d2127;--ink:#e8eaed;--faint:#a3acb8;--rule:#363d46;--grid:#2a3038;
--c0:#56b4e9;--c1:#f0a04b;--c2:#3fcf9f;--c3:#e59ac6;--ok:#3fcf9f;--look:#f0c04b;--fault:#ff8a5c;--limit:#ff8a5c;
--plus:230,120,30;--minus:60,150,215;--strong:#fff;color-scheme:dark;
"""
# Strengths of the six token colours. Text on the strongest is dark in either theme, on the next as the theme needs it.
_ALPHA = (0.12, 0.24, 0.38, 0.54, 0.72, 0.9)


def _tokens() -> str:
    rules = []
    for index, alpha in enumerate(_ALPHA, 1):
        edge = "2px" if index >= 4 else "1px"
        rules.append(f".p{index}{{background:rgba(var(--plus),{alpha});box-shadow:inset 0 {edge} 0 currentColor}}")
        rules.append(f".n{index}{{background:rgba(var(--minus),{alpha});box-shadow:inset 0 -{edge} 0 currentColor}}")
    rules.append(".p5,.n5{color:var(--strong)}.p6,.n6{color:#0c0f13}")
    return "".join(rules)


CSS = f"""
:root{{{_LIGHT}}}
@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{_DARK}}}}}
:root[data-theme=dark]{{{_DARK}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}}
main{{max-width:1240px;margin:0 auto;padding:20px 24px 48px}}
header{{display:flex;gap:16px;align-items:flex-start;justify-content:space-between}}
h1{{font-size:24px;line-height:1.25;margin:0;overflow-wrap:anywhere}}
h2{{font-size:19px;margin:36px 0 6px;padding-top:14px;border-top:1px solid var(--rule)}}
h3{{font-size:15px;margin:20px 0 6px}}figure h3{{margin:0}}
h4{{font-size:12px;margin:10px 0 3px;color:var(--faint);font-weight:600;text-transform:uppercase;letter-spacing:.04em}}
p{{margin:4px 0 10px;max-width:96ch}}
.small,figure p,.sub{{font-size:13px;color:var(--faint)}}
.eyebrow{{font-size:12px;font-weight:600;letter-spacing:.06em;text-transform:uppercase;color:var(--faint);margin:0}}
.sub{{margin:2px 0 14px}}
button{{font:inherit;font-size:13px;color:var(--ink);background:var(--sheet);border:1px solid var(--rule);border-radius:6px;padding:5px 12px;cursor:pointer;white-space:nowrap}}
:focus-visible{{outline:2px solid var(--c0);outline-offset:2px}}
.verdict{{background:var(--sheet);border:1px solid var(--rule);border-left:6px solid var(--faint);border-radius:8px;padding:16px 20px;margin:6px 0 16px}}
.verdict.ok{{border-left-color:var(--ok)}}.verdict.look{{border-left-color:var(--look)}}.verdict.fault{{border-left-color:var(--fault)}}
.verdict>.headline{{display:grid;grid-template-columns:auto 1fr;gap:10px;align-items:baseline;font-size:20px;line-height:1.35;font-weight:600;margin:0 0 12px;max-width:none}}
.sign{{font-weight:700;color:var(--faint)}}.ok .sign{{color:var(--ok)}}.look .sign{{color:var(--look)}}.fault .sign{{color:var(--fault)}}
.verdict>.small{{margin:10px 0 0}}
.verdict ul{{list-style:none;margin:0;padding:0}}
.causes{{display:grid;gap:10px;margin-bottom:14px!important}}
.cause{{display:grid;grid-template-columns:10em 1fr;gap:4px 22px;background:var(--paper);border:1px solid var(--rule);border-radius:8px;padding:12px 16px;break-inside:avoid}}
.cause h2{{border:0;padding:0;margin:0 0 6px;font-size:16px}}.cause code{{font-size:13px;font-weight:400;color:var(--faint);margin-left:4px}}
.cause dl{{margin:0;display:grid;gap:4px}}.cause dl>div{{display:grid;grid-template-columns:6.4em 1fr;gap:10px;align-items:baseline}}
.cause dt{{font-size:13px;color:var(--faint);font-weight:600}}.cause dd{{margin:0;min-width:0;overflow-wrap:anywhere;max-width:90ch}}
.share{{font-size:13px;color:var(--faint)}}.share b{{font-size:20px;color:var(--ink);font-variant-numeric:tabular-nums}}.share .small{{display:block}}
.share svg{{display:block;width:100%;height:6px;margin:4px 0 6px}}.track{{fill:var(--grid)}}.fill{{fill:var(--faint)}}.cause.fault .fill{{fill:var(--fault)}}
.sizes{{display:grid;gap:5px}}
.sizes li{{display:grid;grid-template-columns:5.4em 10.5em 1fr;gap:0 10px;align-items:baseline}}
.sizes li>*{{min-width:0;overflow-wrap:anywhere}}
.badge{{font-size:13px;font-weight:600;white-space:nowrap}}
.badge.ok{{color:var(--ok)}}.badge.look{{color:var(--look)}}.badge.fault{{color:var(--fault)}}
.figures{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(350px,100%),1fr));gap:14px;margin-top:12px}}
.figures.two{{grid-template-columns:repeat(auto-fit,minmax(min(350px,100%),1fr));max-width:1000px}}
figure{{margin:0;padding:12px 12px 8px;border:1px solid var(--rule);border-radius:8px;display:flex;flex-direction:column;break-inside:avoid;min-width:0}}
figure p{{margin:2px 4px 4px}}
.values{{margin:auto 4px 0;padding-top:4px}}.values summary{{font-size:12.5px;color:var(--faint);width:max-content}}
.values .wide{{max-height:17em;overflow:auto;border-top:1px solid var(--grid);margin-top:4px}}.values table{{font-size:12.5px;font-variant-numeric:tabular-nums}}
.values th,.values td{{padding:3px 14px 3px 0;white-space:nowrap;font-weight:400}}.values thead th{{position:sticky;top:0;background:var(--paper);font-size:12px;font-weight:600}}
.legend{{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--faint)}}
.legend span{{display:inline-flex;align-items:center;gap:6px}}
.key{{width:26px;height:12px;flex:none}}
.plot{{width:100%;height:auto;display:block;border-radius:4px;margin-top:4px}}
svg text{{font-size:11.5px;fill:var(--faint)}}
svg .unit{{fill:var(--ink)}}
svg .note{{font-weight:600;paint-order:stroke;stroke:var(--paper);stroke-width:3px}}
.grid{{stroke:var(--grid)}}.axis,.tick{{stroke:var(--faint)}}
.zero{{stroke:var(--faint);stroke-dasharray:2 3}}path.limit{{stroke:var(--limit);stroke-dasharray:6 3;stroke-width:1.5}}path.ideal{{stroke:var(--faint);stroke-dasharray:6 3}}
svg .note.limit{{fill:var(--limit)}}svg .note.ideal{{fill:var(--faint)}}
.guide{{stroke:var(--ink);stroke-width:1;opacity:.55}}
.line{{fill:none;stroke-width:1.8;stroke-linejoin:round}}
.s0{{--s:var(--c0)}}.s1{{--s:var(--c1)}}.s2{{--s:var(--c2)}}.s3{{--s:var(--c3)}}.s4{{--s:var(--ink)}}
.line,.error{{stroke:var(--s)}}.marker{{fill:var(--s);stroke:var(--s)}}.marker.hollow{{fill:var(--paper)}}
.bar{{fill:var(--s);opacity:.85}}.band{{fill:var(--s);opacity:.22}}
.line.s1{{stroke-dasharray:7 3}}.line.s2{{stroke-dasharray:2 3}}.line.s3{{stroke-dasharray:9 3 2 3}}
.part{{fill:var(--s);stroke:var(--s);opacity:.85}}.part.back{{fill-opacity:.35}}.part.hollow{{fill:none;stroke:var(--faint);stroke-dasharray:4 2}}
.whisker,.join{{fill:none;stroke:var(--ink);stroke-width:1.2}}.join{{stroke:var(--faint);stroke-dasharray:2 2}}
svg .halo{{paint-order:stroke;stroke:var(--paper);stroke-width:4px;stroke-linejoin:round}}
svg .strong{{font-weight:600;fill:var(--ink)}}svg .why{{fill:var(--faint)}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;font-size:14px}}.peaks,.stats{{width:100%;max-width:1000px}}
th,td{{text-align:left;padding:5px 22px 5px 0;border-bottom:1px solid var(--grid);vertical-align:baseline}}
th{{white-space:nowrap;font-size:13px;color:var(--faint);font-weight:600}}
.number{{font-variant-numeric:tabular-nums;white-space:nowrap}}
code,pre,.tokens.body,.prompt,.context{{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace;font-size:13px}}
pre{{background:var(--sheet);border:1px solid var(--rule);border-radius:8px;padding:10px 14px;overflow:auto;max-height:32em;margin:8px 0;white-space:pre-wrap;overflow-wrap:anywhere}}
.columns{{columns:3 270px;column-gap:28px;max-height:none}}
.context{{white-space:pre-wrap;overflow-wrap:anywhere;min-width:16em}}
mark{{color:inherit;background:none;border-radius:2px}}mark.p5,mark.n5{{color:var(--strong)}}mark.p6,mark.n6{{color:#0c0f13}}
.tokens i{{font-style:normal;border-radius:2px;unicode-bidi:isolate}}
.body,.prompt{{white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75}}
.prompt{{color:var(--faint);border-left:3px solid var(--rule);padding-left:10px;max-height:11em;overflow:auto;line-height:1.5}}
{_tokens()}
.tokens .m{{color:var(--faint);text-decoration:line-through}}
.tokens .u{{outline:1.5px dotted var(--faint);outline-offset:-1px}}
.body i:hover,.body i.here{{outline:2px solid var(--ink);outline-offset:0}}
.elided{{color:var(--faint);font-style:italic}}
.scale{{display:flex;flex-wrap:wrap;gap:4px 12px;font-size:13px;color:var(--faint);align-items:center;margin:8px 0 2px}}
.scale>span{{display:flex;flex-wrap:wrap}}.scale i{{padding:2px 5px;color:var(--ink);font-variant-numeric:tabular-nums}}
.response{{border:1px solid var(--rule);border-radius:8px;padding:8px 14px;margin:8px 0}}
summary{{cursor:pointer;font-size:14px;overflow-wrap:anywhere}}
.response summary{{display:grid;grid-template-columns:1.3em 2.1em 1fr;align-items:baseline}}
.response summary::before{{content:"\u25b8";color:var(--faint)}}.response[open] summary::before{{content:"\u25be"}}
.rank{{color:var(--faint);font-weight:600}}
#tip{{position:fixed;z-index:9;pointer-events:none;max-width:min(340px,92vw);background:var(--ink);color:var(--paper);padding:5px 10px;border-radius:6px;font-size:13px;line-height:1.4;white-space:pre-wrap;overflow-wrap:anywhere}}
#tip[hidden]{{display:none}}
@media (max-width:640px){{
main{{padding:14px 12px 32px}}
.verdict{{padding:12px 12px}}.verdict>.headline{{font-size:17px}}
.cause{{grid-template-columns:1fr;padding:10px 12px}}.cause dl>div{{grid-template-columns:1fr;gap:0}}
.share{{display:grid;grid-template-columns:auto 1fr;gap:0 6px;align-items:baseline}}.share svg{{grid-column:1/-1}}.share .small{{grid-column:1/-1}}
.sizes{{gap:10px}}.sizes li{{grid-template-columns:5.4em 1fr}}.sizes li>:last-child{{grid-column:1/-1}}
figure{{padding:10px 8px 6px}}.scale i{{padding:2px 1.5px;font-size:11px}}
.peaks tr{{display:flex;flex-wrap:wrap;border-bottom:1px solid var(--grid);padding:4px 0}}
.peaks td,.peaks th{{flex:1 1 0;border:0;padding:1px 6px 1px 0;font-size:13px;white-space:normal;overflow-wrap:anywhere}}
.peaks .context,.peaks th:first-child{{flex:0 0 100%;min-width:0}}.parts :nth-child(5){{flex-grow:1.8}}
.stats td:last-child,.stats th:last-child{{display:none}}.stats .number{{white-space:normal}}.stats td,.stats th{{padding-right:10px}}
}}
@media print{{
:root:root{{{_LIGHT}}}
*{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
body{{font-size:11pt}}main{{max-width:none;padding:0}}
button,#tip,.values:not([open]){{display:none}}
.figures{{grid-template-columns:1fr 1fr}}
.response,.verdict,tr{{break-inside:avoid}}h2{{break-after:avoid}}
.prompt,pre{{max-height:none}}
}}
"""
