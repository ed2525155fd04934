"""The HTML report in Chromium, opened from disk."""

from __future__ import annotations

import pytest
from support.browser import NAMES, Page, find_browser
from support.suite_runs import case, comparison, large_run, suite_run

from hil.controller.workloads.suites.reports import write_reports

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(not BROWSER, reason=f"no browser on PATH: {', '.join(NAMES)}")

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script></script>"
FIRST = ".cases .id"


@pytest.fixture(scope="module")
def page():
    with Page(str(BROWSER)) as page:
        yield page


@pytest.fixture(autouse=True)
def nothing_went_wrong(page):
    """Assert that the test leaves no console errors and that the page requests only itself."""
    page.requests.clear()
    page.resize(1280, 900)
    yield
    assert page.troubles == []
    assert {address.split("#")[0].rpartition("/")[2] for address in page.requests} <= {"report.html", "about:blank"}


def opened(page, folder, *records, state="", **header):
    write_reports(suite_run(folder, list(records), **header))
    page.open(f"{(folder / 'report.html').as_uri()}{state}")
    return page


SMALL = (
    case("a_pass", model="m1", op="Conv", layer="c1", device_p50_ns=100e3),
    case("b_fail", "FAIL", model="m1", op="Conv", layer="c2", device_p50_ns=900e3, board="b2"),
    case("c_crash", "COMPILE_CRASH", model="m2", op="LSTM", detail="<b>signal</b> 6"),
    case("d_slow", model="m2", op="Gemm", device_p50_ns=5e6, outputs=(comparison(sqnr_db="inf", max_abs=0.0),)),
    case(
        "e_known",
        "XFAIL",
        model="m2",
        op="Tanh",
        expectation={"outcome": "FAIL", "reason": "approximated", "issue": ""},
    ),
)


def shown(page):
    return [text.split("\n")[0] for text in page.texts(FIRST)]


def test_report_lists_failures_first_with_totals(page, tmp_path):
    opened(page, tmp_path, *SMALL, missing=("f",))
    assert shown(page) == ["b_fail", "c_crash", "e_known", "a_pass", "d_slow"]
    assert page.texts(".legend button") == ["2 PASS", "1 FAIL", "1 COMPILE_CRASH", "1 XFAIL"]
    assert page.texts("#notes") == ["1 of 6 cases not run: the run is unfinished or was aborted"]
    assert page.texts("#count") == ["5 cases"]
    assert page.run("document.querySelectorAll('#outcomes rect').length") == 4


def test_report_filters_by_text_and_menus(page, tmp_path):
    opened(page, tmp_path, *SMALL)
    page.run("document.querySelector('#q').focus()")
    page.type("conv M1")
    page.wait("document.querySelector('#count').innerText === '2 of 5 cases'")
    assert shown(page) == ["b_fail", "a_pass"]
    page.run(
        "(one => { one.value = 'PASS'; one.dispatchEvent(new Event('change')); })(document.querySelector('#outcome'))"
    )
    assert shown(page) == ["a_pass"]
    page.click("#clear")
    assert len(shown(page)) == 5
    page.type("no such case")
    page.wait("document.querySelector('#count').innerText === '0 of 5 cases'")
    assert page.texts("#table") == ["no matching cases"]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("#outcome=failing", ["b_fail", "c_crash"]),
        ("#op=Conv&sort=p50&dir=asc", ["a_pass", "b_fail"]),
        ("#sort=p50&dir=desc", ["d_slow", "b_fail", "e_known", "a_pass", "c_crash"]),
        ("#sort=sqnr&dir=desc", ["d_slow", "a_pass", "b_fail", "e_known", "c_crash"]),
        ("#sort=place", ["a_pass", "b_fail", "c_crash", "d_slow", "e_known"]),
        ("#stage=compile", ["c_crash"]),
        ("#model=m2&q=gemm", ["d_slow"]),
        ("#board=b2", ["b_fail"]),
        ("#q=approximated", ["e_known"]),
    ],
)
def test_report_url_restores_view(page, tmp_path, state, expected):
    opened(page, tmp_path, *SMALL, state=state)
    assert shown(page) == expected


def test_report_column_click_toggles_sort_order(page, tmp_path):
    opened(page, tmp_path, *SMALL)
    header = ".cases thead th:nth-child(1) button"
    page.click(header)
    assert shown(page) == sorted(record.id for record in SMALL)
    assert page.run("document.querySelector('.cases thead th').getAttribute('aria-sort')") == "ascending"
    page.click(header)
    assert shown(page) == sorted((record.id for record in SMALL), reverse=True)
    assert page.run("location.hash") == "#sort=id&dir=desc"


def test_failure_bar_click_filters_cases(page, tmp_path):
    opened(page, tmp_path, *SMALL)
    page.click("#by-op .groups li:nth-child(1) button")
    assert shown(page) == ["b_fail"]
    page.click("#by-op .groups li:nth-child(1) button")
    assert len(shown(page)) == 5


def test_row_click_shows_case_details(page, tmp_path):
    record = case(
        "q",
        "FAIL",
        hint="look closer",
        detail="line 1\nline 2",
        confirmed="flaky",
        attempts=({"why": "confirm", "board": "b2", "outcome": "PASS", "message": "fine now"},),
        outputs=(comparison(), comparison(name="z", passed=False, sqnr_db=7.25)),
        plain_outputs=(comparison(sqnr_db=31.5),),
        plain_against="onnxruntime, float",
        timings={"compile_s": 1.5, "run_s": 0.25},
    )
    opened(page, tmp_path, record)
    page.click(FIRST)
    (text,) = page.texts(".detail")
    told = [record.message, "look closer", "line 1\nline 2", "flaky", "fine now", record.repeat, record.diff]
    told += ["7.25 dB", "31.5 dB", "onnxruntime, float", "compile 1.5 s, run 250 ms", "cases/q", "125 µs"]
    assert [one for one in told if one not in text] == []
    assert page.run("document.querySelectorAll('.detail .inner').length") == 3
    page.click(FIRST)
    assert page.texts(".detail") == []


def test_report_supports_keyboard_navigation(page, tmp_path):
    opened(page, tmp_path, *SMALL)
    page.run("document.querySelector('#clear').focus()")
    for _ in range(50):
        if page.run("document.activeElement.className") == "id":
            break
        page.press("Tab")
    page.press("Enter")
    assert page.run("document.activeElement.getAttribute('aria-expanded')") == "true"
    below = page.run("document.activeElement.getAttribute('aria-controls')")
    assert page.run(f"document.getElementById({below!r}).innerText").startswith("y: 41 of 1024")


def test_copy_button_copies_command(page, tmp_path):
    opened(page, tmp_path, *SMALL, state="#open=b_fail")
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.click(".detail .command button")
    page.wait("document.querySelector('.detail .command button').innerText === 'Copied'")
    assert page.run("navigator.clipboard.readText()") == "hil suite run @models --flow iree --filter b_fail"


def test_plot_point_click_opens_case(page, tmp_path):
    layers = [case(f"l{n}", "FAIL" if n == 3 else "PASS", model="net", layer=f"n{n}", op="Conv") for n in range(6)]
    opened(page, tmp_path, *layers, case("lost", "RUN_CRASH", model="net", layer="n6", op="Add"), state="#q=nothing")
    assert page.run("document.querySelectorAll('#error-plot circle').length") == 6
    assert page.run("document.querySelectorAll('#error-plot .cross').length") == 1
    page.run("document.querySelector('#error-plot circle.fail').dispatchEvent(new MouseEvent('click'))")
    assert page.run("document.activeElement.innerText") == "l3"
    assert page.run("document.activeElement.getAttribute('aria-expanded')") == "true"


def test_error_plot_shows_exact_and_infinite_values(page, tmp_path):
    beyond = case("f_inf", "FAIL", outputs=(comparison(passed=False, sqnr_db="-inf", max_abs="inf"),))
    opened(page, tmp_path, *SMALL, beyond, case("g_nan", "FAIL", outputs=(comparison(sqnr_db="nan", max_abs="nan"),)))
    for measure, word in (("sqnr", "exact"), ("maxAbs", "0")):
        page.run(
            f"(one => {{ one.value = '{measure}'; one.dispatchEvent(new Event('change')); }})"
            "(document.querySelector('#error-what'))"
        )
        assert word in page.run("[...document.querySelectorAll('#error-plot text')].map(one => one.textContent)")
        marks = [page.run(f"document.querySelectorAll('#error-plot {kind}').length") for kind in ("circle", ".cross")]
        assert marks == [4, 3]
        assert not page.run("/NaN|Infinity/.test(document.querySelector('#error-plot').innerHTML)")


def test_report_escapes_hostile_names(page, tmp_path):
    values = dict.fromkeys(("model", "layer", "op", "board", "message", "hint", "detail", "repeat", "folder"), HOSTILE)
    known = {"outcome": HOSTILE, "reason": HOSTILE, "issue": "javascript:document.title='owned'"}
    records = [case(f"{n}{HOSTILE}", "FAIL", **values, expectation=known, confirmed=HOSTILE) for n in range(4)]
    records.append(case("last", outputs=(comparison(name=HOSTILE, reason=HOSTILE),), attempts=({"why": HOSTILE},)))
    opened(page, tmp_path, *records, suite=HOSTILE, boards=[HOSTILE], versions={HOSTILE: HOSTILE})
    for place in range(5):
        page.run(f"document.querySelectorAll('{FIRST}')[{place}].click()")
    assert "owned" not in page.run("document.title").split("onerror")[0]
    assert page.run("document.querySelectorAll('img, body script:not(#data)').length") == 1
    assert page.run("[...document.links].every(one => one.protocol === 'file:')")
    assert HOSTILE in page.texts(".detail")[0] and HOSTILE in page.texts("h1")[0]


def test_content_policy_blocks_injected_script(page, tmp_path):
    opened(page, tmp_path, *SMALL)
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.owned = true\">')")
    page.run("new Promise(done => setTimeout(done, 200))")
    assert page.run("window.owned") is None
    assert page.troubles and all("Content Security Policy" in one for one in page.troubles)
    page.troubles.clear()
    page.requests.clear()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 768, 390])
@pytest.mark.parametrize("unfolded", [False, True])
def test_report_fits_window_width(page, tmp_path, width, unfolded):
    page.resize(width, 844)
    opened(page, tmp_path, *large_run(60), case("x" * 150, "FAIL", message="y" * 300, repeat="z" * 300))
    if unfolded:
        page.run(f"document.querySelectorAll('{FIRST}').forEach((one, place) => place < 8 && one.click())")
    for place in ("document.documentElement", "document.querySelector('#table')"):
        assert page.run(f"{place}.scrollWidth - {place}.clientWidth") <= 0, place
    columns = page.run("[...document.querySelectorAll('.cases > thead th')].filter(one => one.offsetWidth).length")
    assert columns == 2 if width == 390 else columns >= 5


def test_report_shows_empty_and_passing_runs(page, tmp_path):
    opened(page, tmp_path / "none", missing=("a",))
    assert page.texts("#table") == ["no finished cases"]
    opened(page, tmp_path / "good", case("a"))
    assert page.texts("#by-op") == ["no failures"] and shown(page) == ["a"]


@pytest.mark.slow
def test_report_with_thousands_of_cases_sorts_quickly(page, tmp_path):
    records = large_run(2000)
    opened(page, tmp_path, *records)
    assert len(shown(page)) == 100
    # Best of three on a possibly busy machine. A person notices a delay from one second.
    timed = "(() => { const start = performance.now(); sortBy('p50'); return performance.now() - start; })()"
    assert min(page.run(timed) for _ in range(3)) < 3000
    page.click("#more button:last-child")
    assert len(shown(page)) == len(records)


def test_report_excludes_single_cold_iteration_from_ranking(page, tmp_path):
    cold = {"iterations": 1, "cold": True}
    opened(page, tmp_path / "some", case("a", **cold), case("b", device_p50_ns=9e6))
    (text,) = page.texts("#device-plot")
    assert "1 of 1 case, each is the median of 10 iterations" in text
    assert "1 case timed with 1 cold iteration and not ranked" in text
    opened(page, tmp_path / "all", case("a", **cold), case("b", **cold))
    (text,) = page.texts("#device-plot")
    assert text.startswith("all cases timed with 1 cold iteration") and "--iterations 20" in text


def test_row_links_case_files(page, tmp_path):
    (tmp_path / "run/cases/q/outputs").mkdir(parents=True)
    (tmp_path / "ir/q").mkdir(parents=True)
    other = {"against": "another", "outcome": "PASS", "outputs": [comparison()]}
    record = case("q", "FAIL", directories={"ir": "../ir/q"}, other_references=(other,), disagreement="this vs that")
    opened(page, tmp_path / "run", record)
    page.click(FIRST)
    links = page.run(
        "[...document.querySelectorAll('.detail dd a')].map(one => `${one.textContent} ${one.getAttribute('href')}`)"
    )
    assert links == ["cases/q ./cases/q", "outputs ./cases/q/outputs", "ir ./../ir/q"]
    assert "Compared with an additional reference: another" in page.texts(".detail")[0]
