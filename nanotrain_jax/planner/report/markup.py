"""HTML and CSS of the report: sections, tables that scroll in their own box, stacked bars. No scripts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from html import escape
from typing import Any


class Html(str):
    """A table cell of trusted HTML; `table` escapes all others."""


def section(title: str, lead: str, body: str) -> str:
    """Return a section: heading, lead paragraph, body. Only the heading is escaped."""
    return f'<section><h2>{escape(title)}</h2><p class="lead">{lead}</p>{body}</section>\n'


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], marked: Collection[int] = ()) -> str:
    """Return a table that scrolls in its own box. head: ">" marks a column of numbers. marked: rows to highlight."""

    def line(tag: str, cells: Sequence[Any], kind: str = "") -> str:
        texts = (cell if isinstance(cell, Html) else escape(str(cell)) for cell in cells)
        kinds = (' class="number"' if name.startswith(">") else "" for name in head)
        return f"<tr{kind}>{''.join(f'<{tag}{k}>{t}</{tag}>' for k, t in zip(kinds, texts, strict=True))}</tr>"

    body = "".join(line("td", row, ' class="marked"' if i in marked else "") for i, row in enumerate(rows))
    names = line("th", [name.removeprefix(">") for name in head])
    return f'<div class="scroll" tabindex="0"><table><thead>{names}</thead><tbody>{body}</tbody></table></div>'


def bar(parts: Iterable[tuple[str, float, str]], scale: float, text: Callable[[float], str], marks: str = "") -> str:
    """Return a stacked bar. parts: name, size, style; scale: the size of the full width; marks: HTML on top."""
    parts = [(f"{escape(name)} {text(size)}", escape(name), size, style) for name, size, style in parts if size > 0]
    segments = (
        f'<i style="width:{size / scale:.4%};{style}" title="{label}"><span>{name}</span></i>'
        for label, name, size, style in parts
    )
    label = ", ".join(label for label, *_ in parts)
    return f'<div class="bar" role="img" aria-label="{label}">{"".join(segments)}{marks}</div>'


def mini(*parts: tuple[float, str]) -> Html:
    """Return a small bar for a table cell. parts: fraction of its width, style."""
    segments = "".join(f'<i style="width:{share:.2%};{style}"></i>' for share, style in parts)
    return Html(f'<div class="mini">{segments}</div>')


def key(style: str, name: str) -> Html:
    """Return a legend entry: a name beside its colour."""
    return Html(f'<i class="key" style="{style}"></i>{escape(name)}')


CSS = """
:root{color-scheme:light dark;--page:#fff;--ink:#191c20;--mute:#5f6670;--line:#e4e5e7;--waits:#e7e9ec;--mark:#eef3f9;
--good:#1b7a48;--maybe:#8a6100;--bad:#c0281f;
--font:-apple-system,"Segoe UI",Roboto,"Helvetica Neue","Liberation Sans",Arial,sans-serif}
@media screen and (prefers-color-scheme:dark){:root{--page:#14161a;--ink:#e7e9ec;--mute:#9aa2ad;--line:#2b2f36;
--waits:#343a43;--mark:#1f2732;--good:#63cf97;--maybe:#e5c84a;--bad:#ff8075}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 var(--font);font-variant-numeric:tabular-nums;
-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{max-width:1120px;margin:0 auto;padding:48px 24px 56px}
h1,h2,h3,p,dl,dd{margin:0}
h1{font-size:36px;line-height:1.15;letter-spacing:-.015em}h1 span{font-weight:400;color:var(--mute)}
h2{font-size:22px;line-height:1.3;letter-spacing:-.005em}h3{font-size:14px;margin:28px 0 4px}
small{font-size:12px;font-weight:400;color:var(--mute)}
section{margin-top:60px}.lead{max-width:82ch;margin:4px 0 20px;color:var(--mute)}
.verdict{margin-top:8px;font-size:18px}.good b{color:var(--good)}
.maybe b{color:var(--maybe)}.bad b,.over b,.over b+small{color:var(--bad)}
.facts{display:flex;flex-wrap:wrap;gap:12px 36px;margin:24px 0 32px}dt{font-size:12px;color:var(--mute)}
.tiles{display:grid;grid-template-columns:repeat(5,1fr);gap:0 28px}
.tiles div{border-top:2px solid var(--ink);padding:10px 0 20px}.tiles p{font-size:13px;color:var(--mute)}
.tiles h3{margin:0;font-size:13px;font-weight:400;color:var(--mute)}.tiles h3+p small{font-size:17px;margin-left:4px}
.tiles h3+p{font-size:38px;line-height:1.2;font-weight:700;letter-spacing:-.015em;color:var(--ink)}
.rows{display:grid;gap:12px;margin-bottom:20px}
.row{display:grid;grid-template-columns:84px 1fr 96px;gap:14px;align-items:center;line-height:1.2}
.row small{display:block}.row>:last-child{text-align:right}
.flag{position:relative;height:14px;font-size:12px;color:var(--mute)}.flag span{position:absolute;white-space:nowrap}
.bar{position:relative;display:flex;height:34px;background:var(--waits)}
.bar>i{container-type:inline-size;box-shadow:inset -1px 0 var(--page);overflow:hidden;text-align:center;
white-space:nowrap}
.bar span{display:none;font:600 12.5px/34px var(--font)}@container (min-width:80px){.bar span{display:inline}}
.bar>.limit{position:absolute;top:-8px;bottom:-8px;width:2px;background:var(--ink);
box-shadow:1px 0 var(--page),-1px 0 var(--page)}
.bar>.excess{position:absolute;height:4px;bottom:-6px;box-shadow:none;background:var(--bad)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;min-width:min(100%,680px)}
td,th{padding:6px 16px 6px 0;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
th{font-weight:400;font-size:12px;color:var(--mute)}td:first-child,th:first-child{padding-left:6px}
.number{text-align:right}.marked td{font-weight:700;background:var(--mark)}
.key{display:inline-block;width:11px;height:11px;margin-right:9px}.mini{display:flex;width:90px;height:9px}
.gantt svg{display:block;max-width:100%;min-width:720px;height:auto}.gantt text{font-family:var(--font)!important}
.gantt text:not([style*=fill]){fill:currentColor}
.formula{display:grid;grid-template-columns:15em 1fr fit-content(17em);gap:2px 24px;padding:8px 6px;font-size:14px;
border-bottom:1px solid var(--line)}
code{display:block;font:12.5px/1.6 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
overflow-wrap:anywhere}code+code{color:var(--mute)}.formula p{text-align:right}
footer{margin-top:60px;padding-top:16px;border-top:1px solid var(--line);font-size:12px;color:var(--mute)}
@media (max-width:700px){main{padding:28px 16px 40px}h1{font-size:28px}section{margin-top:44px}.facts{gap:10px 24px}
.tiles{grid-template-columns:1fr 1fr;gap:0 16px}.tiles div:first-child{grid-column:1/-1}.tiles h3+p{font-size:28px}
.row{grid-template-columns:62px 1fr 78px;gap:8px;font-size:13px}
.formula{grid-template-columns:1fr fit-content(14em)}.formula div{grid-row:2;grid-column:1/-1}}
@media print{main{max-width:none;padding:0}.rows,.row,.formula,tr,.gantt,header{break-inside:avoid}
h2,h3,.lead{break-after:avoid}section{margin-top:28px}.scroll{overflow:visible}.gantt svg{min-width:0}
table{font-size:10.5px}th{font-size:9px}td,th{padding-right:8px}td:last-child{white-space:normal}.mini{width:40px}
.tiles{gap:0 16px}.tiles h3+p{font-size:26px}}
"""
