"""The HTML report in a real browser: self-contained, readable, to scale, and without scripts."""

import json
import re
import shutil
from collections import Counter
from html import unescape

import pytest
from conftest import cover

from nanotrain_jax.config import load
from nanotrain_jax.config.resolve import resolve
from nanotrain_jax.costs import hardware
from nanotrain_jax.parallel.pipeline.schedule import SCHEDULES
from nanotrain_jax.planner.estimate import estimate
from nanotrain_jax.planner.formula import Line, Section
from nanotrain_jax.planner.report import page
from nanotrain_jax.planner.search import search

FLAGS = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --window-size=1200,900"""
HOSTILE = "<script>document.title = 'ran'</script><img src=x onerror=\"document.title = 'ran'\">\"'&"
EXPLAINED = [
    Section(
        "Parameters", "PaLM, arXiv 2204.02311", [Line("matmuls", "2 D^2 + D F", "2 x 3^2 + 3 x 5", 33, "parameters")]
    ),
    Section("Memory", "ZeRO, arXiv 1910.02054", [Line("weights", "2 Psi", "2 x 1.0625", 2.125, "GB")]),
]


def planned(gpu="h100", layers=32, data=1, microbatches=4, **parallel):
    """Return the estimate of a 7B model, or of one with fewer or more layers."""
    tree = {
        "model": {"num_layers": layers, "d_model": 4096, "num_heads": 32, "vocab_size": 32000},
        "parallel": {"data": data, "microbatches": microbatches, "zero": int(data > 1), **parallel},
        "memory": {"remat": "full"},
        "data": {"source": "synthetic", "batch_size": data * microbatches, "seq_len": 4096},
    }
    config = load.parse(tree)
    return estimate(resolve(config, config.parallel.axes), gpu)


def compiled_like(plan):
    """Return a possible result of the compiler: 3% more memory, twice the bytes."""
    theory = Counter()
    for t in plan.transfers:
        theory[t.axis, t.op] += t.bytes
    collectives = [
        {"axis": axis, "op": op, "bytes_per_device": 2 * size, "count": 7, "exposed_bytes": size / 2}
        for (axis, op), size in theory.items()
    ]
    state = sum(plan.moments["update"][part] for part in ("params", "optimizer"))
    return {"peak_bytes": 1.03 * plan.peak_bytes, "argument_bytes": state, "collectives": collectives}


@pytest.fixture(scope="module")
def plan():
    return planned(pipe=4, data=2, tensor=2, microbatches=32, schedule="interleaved", chunks=8)


@pytest.fixture(scope="module")
def found(plan):
    one = dict.fromkeys(plan.config.parallel.axes, 1)
    config = plan.config.replace("parallel", **one, microbatches=1, schedule="1f1b", chunks=1, zero=0)
    return search(resolve(config, one), "h100", 16)


@pytest.fixture(scope="module")
def everything(plan, found):
    """The page with every section."""
    return page.html(plan, EXPLAINED, found, compiled_like(plan))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    install = "pip install -e '.[test]', and on Debian apt-get install chromium chromium-driver"
    webdriver = pytest.importorskip("selenium.webdriver", reason=f"selenium is missing: {install}")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    for name, path in {"chromium": program, "chromedriver": driver}.items():
        if not path:
            pytest.skip(f"{name} is missing: {install}")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture
def show(browser, tmp_path):
    """show(text, width, colors): load the page in the browser, and return its address."""

    def show(text, width=1200, colors="light"):
        file = tmp_path / "index.html"
        file.write_text(text, encoding="utf-8")
        for kind in "browser", "performance":
            browser.get_log(kind)  # discard earlier entries
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": colors}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        browser.get(file.as_uri())
        return file.as_uri()

    return show


def cells(browser, number):
    """Return the text of the body of a table: rows of cells."""
    script = "return [...document.querySelectorAll('table')[arguments[0]].tBodies[0].rows].map(r => "
    return browser.execute_script(script + "[...r.cells].map(c => c.innerText))", number)


def visible_text(text):
    """Return the visible text as one line."""
    text = re.sub(r"<style>.*?</style>", "", text, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_the_page_logs_nothing_and_requests_only_itself(browser, show, everything):
    address = show(everything)
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert requested == [address]
    assert browser.find_elements("tag name", "script") == []


@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_does_not_scroll_horizontally(browser, show, everything, width):
    show(everything, width)
    inner, scrolled = browser.execute_script(
        "const e = document.documentElement; return [e.clientWidth, e.scrollWidth]"
    )
    assert width - 20 < inner <= width
    assert scrolled == inner
    # Wide elements scroll in their own box; none is cut off.
    cut = "const w = document.documentElement.clientWidth; return [...document.querySelectorAll('main *')].filter(e => "
    cut += "!e.closest('.scroll') && e.getBoundingClientRect().right > w + 1).map(e => e.outerHTML.slice(0, 80))"
    assert browser.execute_script(cut) == []


@pytest.mark.parametrize("colors", ["light", "dark"])
def test_text_has_sufficient_contrast(browser, show, everything, colors):
    show(everything, colors=colors)
    background, worst = browser.execute_script("""
        const rgb = text => text.match(/[\\d.]+/g).map(Number);
        const light = c => c.slice(0, 3).map(x => x / 255).map(x => x > .04 ? ((x + .055) / 1.055) ** 2.4 : x / 12.92)
            .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
        function behind(e) {
            const c = rgb(getComputedStyle(e).backgroundColor);
            return c.length == 4 && c[3] == 0 ? behind(e.parentElement) : c;
        }
        const found = [...document.querySelectorAll('main *:not(svg *)')].filter(e => e.offsetParent &&
            [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())).map(e => {
                const [a, b] = [light(rgb(getComputedStyle(e).color)), light(behind(e))];
                return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.innerText];
            });
        return [light(behind(document.body)), found.sort((a, b) => a[0] - b[0])[0]];
    """)
    assert background > 0.9 if colors == "light" else background < 0.02
    assert worst[0] > 4.5, worst  # WCAG 2.2, level AA


def bars(browser):
    """Return name -> [(width, title) of segments, position of the limit, is over, text]; lengths in bar widths."""
    rows = browser.execute_script("""
        return [...document.querySelectorAll('.row')].filter(r => r.querySelector('.bar')).map(r => {
            const box = r.querySelector('.bar').getBoundingClientRect(), share = x => x / box.width;
            return [r.firstChild.firstChild.data, [...r.querySelectorAll('.bar > i[title]')].map(
                i => [share(i.getBoundingClientRect().width), i.title]),
                share(r.querySelector('.limit').getBoundingClientRect().left - box.left),
                r.classList.contains('over'), r.innerText];
        });
    """)
    return {name: rest for name, *rest in rows}


@pytest.mark.parametrize("width", [1200, 400])
def test_segment_widths_are_proportional_to_bytes(browser, show, plan, everything, width):
    show(everything, width)
    capacity, compiled = hardware.find(plan.gpu).memory_bytes, compiled_like(plan)
    state = compiled["argument_bytes"]
    expected = plan.moments | {"compiled": {"arguments": state, "temporaries": compiled["peak_bytes"] - state}}
    found = bars(browser)
    assert list(found) == list(expected)
    for name, parts in expected.items():
        segments, limit, over, text = found[name]
        parts = {part: size for part, size in parts.items() if size}
        assert [title.rsplit(" ", 2)[0] for _, title in segments] == list(parts)
        assert [share for share, _ in segments] == pytest.approx([size / capacity for size in parts.values()], abs=2e-4)
        for (_, title), size in zip(segments, parts.values(), strict=True):
            assert float(title.split()[-2].replace(",", "")) == pytest.approx(size / 1e9, rel=5e-3)
        assert limit == pytest.approx(plan.limit_bytes / capacity, abs=2e-4)
        assert not over
        assert ("peak" in text) == (name == plan.peak)
    assert "ratio 1.030" in found["compiled"][-1]


def test_a_bar_over_the_limit_is_marked(browser, show):
    plan = planned()
    sums = {name: sum(parts.values()) for name, parts in plan.moments.items()}
    plan = plan._replace(limit_bytes=(min(sums.values()) + max(sums.values())) / 2)
    show(page.html(plan, []))
    assert "does not fit" in browser.find_element("css selector", ".verdict").text
    for name, (_, _, over, text) in bars(browser).items():
        assert over == (sums[name] > plan.limit_bytes)
        assert ("GB over" in text) == over
    script = (
        "return [...document.querySelectorAll('.over .bar')].map(b => ['.excess', '.limit', 'i:nth-last-of-type(3)']"
    )
    script += ".map(s => b.querySelector(s).getBoundingClientRect()))"
    for excess, limit, last in browser.execute_script(script):  # from the limit to the end of the bar
        assert (excess["left"], excess["right"]) == pytest.approx((limit["left"], last["right"]), abs=0.1)


def test_every_transfer_has_a_row_beside_the_compiled_collectives(browser, show, plan, everything):
    show(everything)
    rows, compiled = cells(browser, 2), cells(browser, 3)
    assert len(rows) == len(plan.transfers)
    for row, t in zip(rows, plan.transfers, strict=True):
        assert [row[0], row[1], row[6], row[8]] == [t.axis.replace(",", " x "), t.op.replace("_", "-"), t.link, t.why]
        assert float(row[2].replace(",", "")) == pytest.approx(t.bytes / 1e9, rel=5e-3)
    assert [tuple(row[:2]) for row in compiled] == list(dict.fromkeys(tuple(row[:2]) for row in rows))
    assert {tuple(row[4:]) for row in compiled} == {("2.000", "7", "25.0%")}


def test_transfers_of_only_the_estimate_or_only_the_compiler_are_shown(browser, show, plan):
    collectives = [{"axis": "replica", "op": "all_to_all", "bytes_per_device": 1e9, "count": 1, "exposed_bytes": 0.0}]
    show(page.html(plan, [], None, compiled_like(plan) | {"collectives": collectives}))
    *theory, last = cells(browser, 3)
    assert {(row[2], row[4]) for row in theory} == {("0", "0.000")}
    assert last == ["replica", "all-to-all", "1", "0", "-", "1", "0.0%"]


def test_every_candidate_and_every_reason_has_a_row(browser, show, plan, found, everything):
    show(everything)
    rows, reasons = cells(browser, 4), cells(browser, 5)
    best = found.best[:10]
    assert len(rows) == len(best) > 3
    for row, e in zip(rows, best, strict=True):
        p = e.config.parallel
        assert row[1] == " x ".join(f"{axis} {size}" for axis, size in p.axes.items() if size > 1)
        assert [row[2], row[4], row[5]] == [str(p.zero), str(p.chunks), str(p.microbatches)]
        chunk = e.config.model.loss_chunk
        assert row[6] == (f"{e.config.memory.remat}, loss_chunk={chunk}" if chunk else e.config.memory.remat)
        assert float(row[7]) == pytest.approx(e.peak_bytes / 1e9, rel=5e-3)
        assert row[10:] == [f"{100 * e.mfu:.1f}", f"{100 * e.bubble_fraction:.1f}"]
    assert sum(int(row[0].replace(",", "")) for row in reasons) == found.rejected.total()
    assert [row[2] for row in reasons[:10]] == [reason for reason, _ in found.rejected.most_common(10)]
    assert browser.find_elements("css selector", "td:nth-child(12)")
    widths = "return [...document.querySelectorAll('table')[4].querySelectorAll('.mini > i')].map(i => i.offsetWidth)"
    slowest = max(e.step_seconds for e in best)
    assert browser.execute_script(widths) == pytest.approx([90 * e.step_seconds / slowest for e in best], abs=1)
    marked = "return [...document.querySelectorAll('table')[4].rows].map(r => r.className)"
    assert "marked" not in browser.execute_script(marked)
    show(page.html(best[1], [], found))
    rows = browser.execute_script(marked.replace("[4]", "[3]"))
    assert rows.index("marked") == 2
    assert rows.count("marked") == 1


def test_a_schedule_is_drawn_only_with_pipeline_stages(browser, show, plan, everything):
    show(everything)
    (drawing,) = browser.find_elements("css selector", "svg")
    assert drawing.rect["width"] > 700
    assert drawing.rect["height"] > 150
    texts = browser.execute_script("return [...document.querySelectorAll('svg text')].map(t => t.textContent.trim())")
    assert [t for t in texts if t.startswith("stage")] == [f"stage {s}" for s in range(4)]
    assert "Drawn: 4 of 8 chunks, 8 of 32 microbatches" in visible_text(everything)
    assert f"is {plan.bubble_fraction:.1%}." in visible_text(everything)
    show(page.html(planned(data=4), []))
    assert browser.find_elements("css selector", "svg") == []
    assert "no pipeline stages" in browser.find_element("tag name", "header").text


@pytest.mark.parametrize(
    "name", cover(["interleaved", "1f1b_lean"], sorted({*SCHEDULES} - {"interleaved", "1f1b_lean"}))
)
def test_a_large_schedule_is_drawn_in_part(name):
    chunks = 8 if name == "interleaved" else 1
    text = page.html(planned(layers=256, pipe=32, microbatches=96, schedule=name, chunks=chunks), [])
    assert len(set(re.findall(r">stage \d+<", text))) == (4 if chunks > 1 else 8)
    drawn = "4 of 32 stages, 4 of 8 chunks, 8 of 96" if chunks > 1 else "8 of 32 stages, 16 of 96"
    assert f"Drawn: {drawn} microbatches" in visible_text(text)


def test_the_headline_has_the_numbers_and_labels_every_time_as_modelled(plan, everything):
    text = visible_text(everything)
    for shown in (
        "llama 6.74B parameters",
        "16 x NVIDIA H100 80GB HBM3",
        "pipe 4 x data 2 x tensor 2",
        "stage 1",
        "interleaved, 8 chunks",
        "32 of 1 x 4,096 tokens",
        f"tokens/s, modelled {plan.tokens_per_second:,.0f}",
        f"MFU, modelled {100 * plan.mfu:.1f} %",
        f"bubble, modelled {100 * plan.bubble_fraction:.1f} %",
    ):
        assert shown in text
    free = plan.limit_bytes - 1.03 * plan.peak_bytes
    for pattern, value in {
        r"peak memory per GPU ([\d.,]+) GB of": plan.peak_bytes / 1e9,
        r"of a limit of ([\d.,]+) GB": plan.limit_bytes / 1e9,
        r"fits ([\d.,]+) GB free, compiled": free / 1e9,
        r"step, modelled ([\d.,]+) s for 64 x 4,096 tokens": plan.step_seconds,
    }.items():
        assert float(re.search(pattern, text)[1].replace(",", "")) == pytest.approx(value, rel=5e-3)
    assert text.count("time, modelled") == 2
    assert text.count("step, modelled") == 2
    assert "not measured" in text


def test_every_formula_has_its_numbers(everything):
    text = visible_text(everything)
    for section in EXPLAINED:
        for line in section.lines:
            value = "33 parameters" if line.unit == "parameters" else "2.125 GB"
            assert f"{line.what} = {line.formula} = {line.numbers} {value}" in text
        assert f"{section.title} {section.source}" in text
    assert "Formulas" not in visible_text(page.html(planned(), []))


def test_hostile_text_is_escaped_and_does_not_run(browser, show, plan, found):
    explained = [Section(HOSTILE, HOSTILE, [Line(HOSTILE, HOSTILE, HOSTILE, 1.0, HOSTILE)])]
    collectives = [{"axis": HOSTILE, "op": HOSTILE, "bytes_per_device": 1.0, "count": 1, "exposed_bytes": 0.0}]
    hostile = plan._replace(
        config=plan.config.replace("parallel", schedule="1f1b", chunks=1),
        transfers=[t._replace(axis=HOSTILE, op=HOSTILE, why=HOSTILE, link=HOSTILE) for t in plan.transfers],
        seconds=plan.seconds | {HOSTILE: 1.0},
    )
    bad = found._replace(best=[hostile], rejected=found.rejected + Counter({HOSTILE: 10**6}))
    compiled = compiled_like(plan) | {"collectives": collectives}
    text = page.html(hostile, explained, bad, compiled, page.Origin("x.yaml", HOSTILE, HOSTILE))
    policy = re.search(r"<meta http-equiv=.*?>\n", text)[0]
    show(text.replace(policy, ""))  # escaped text is safe without the policy
    title = browser.title
    assert title == "x.yaml: llama on 16 x h100"
    assert browser.find_elements("css selector", "script, img") == []
    shown = browser.find_element("tag name", "main").get_attribute("textContent")
    assert shown.count(HOSTILE) >= 22 + 3 * len(plan.transfers)
    show(text.replace("<main>", f"<main>{HOSTILE}"))  # the policy blocks unescaped text
    assert browser.title == title
    show(text.replace("<main>", f"<main>{HOSTILE}").replace(policy, ""))  # without both it runs
    assert browser.title == "ran"


def test_the_page_is_deterministic(plan, found, everything):
    assert page.html(plan, EXPLAINED, found, compiled_like(plan)) == everything
