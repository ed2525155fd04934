import json
import math
import random

import pytest
from support.web import asking, write_run, write_suite

from hil.controller.analysis.steps import find_steps
from hil.controller.web.history.charts import make_case_chart, make_plain_chart
from hil.controller.web.history.regressions import RegressionFilter, list_regressions, parse_since
from hil.controller.web.history.remarks import NAME, annotate, correct_remark, read_annotations
from hil.controller.web.history.suite_history import read_suite
from hil.controller.web.index.index import IndexReader, IndexWriter
from hil.controller.web.index.indexer import Indexer
from hil.controller.web.index.series import MEASURES, HistoryFilter, judge, list_identities, read_series
from hil.errors import UsageError

DAY = 86400.0
SLOW, BROKEN = 14, 17


def nightly(root, count=22, *, name="night", board="sim", since=1.7e9):
    """Write sessions with three cases. From a session on, the first is 8 % slower, and the second fails later."""
    rolled = random.Random(11)
    for number in range(count):
        cases = []
        for case in ("slow", "broken", "steady"):
            time = 1e5 * rolled.gauss(1, 0.008) * (1.08 if case == "slow" and number >= SLOW else 1.0)
            outcome = "FAIL" if case == "broken" and number >= BROKEN else "PASS"
            one = {"id": case, "outcome": outcome, "ended": outcome, "board": board, "iterations": 20}
            cases.append(
                {**one, "device_p50_ns": time, "device_p90_ns": time * 1.01, "message": "off" * (outcome != "PASS")}
            )
        origin = {"commit": f"{number:040x}", "branch": "main"}
        write_suite(root, f"{name}-{number:02d}", cases, started=since + number * DAY, boards=[board], origin=origin)


@pytest.fixture
def database(tmp_path):
    runs = tmp_path / "runs"
    nightly(runs)
    nightly(runs, 3, name="other", board="rpi5")
    with IndexWriter(tmp_path / "index.sqlite") as writer:
        indexer = Indexer(writer, [runs])
        indexer.scan()
        indexer.scan()
    with IndexReader(tmp_path / "index.sqlite").open_snapshot() as found:
        yield found


def test_history_separates_boards(database):
    found = list_identities(database, HistoryFilter(case="slow"))
    assert [(one["board"], count) for one, count in found] == [("sim", 22), ("rpi5", 3)]
    series = read_series(database, "slow", found[1][0], MEASURES["device"])
    assert [one.id for one in series.points] == ["other-00", "other-01", "other-02"]


def test_history_locates_step_of_measure(database, tmp_path):
    identity = list_identities(database, HistoryFilter(case="slow", board="sim"))[0][0]
    series = read_series(database, "slow", identity, MEASURES["device"])
    (step,) = series.steps
    assert (step.index, step.worse, series.flips) == (SLOW, True, [])
    assert step.ratio == pytest.approx(1.08, abs=0.01)
    stored = [
        json.loads((tmp_path / "runs" / f"night-{n:02d}" / "results.jsonl").read_text().splitlines()[0])
        for n in range(22)
    ]
    assert [one.value for one in series.points] == [one["device_p50_ns"] for one in stored]
    assert find_steps([math.log(one["device_p50_ns"]) for one in stored], least=math.log1p(0.03)) == [SLOW]


def test_history_chart_spaces_whole_commits_evenly(database):
    identity = list_identities(database, HistoryFilter(case="slow", board="sim"))[0][0]
    series = read_series(database, "slow", identity, MEASURES["device"])
    # The commits share their first characters.
    chart = make_case_chart(series, MEASURES["device"], HistoryFilter(case="slow", x="commit"), {3: ["remark"]})
    assert chart["x"] == [float(one) for one in range(22)] and len(chart["labels"]) == 22
    assert (chart["remarks"], chart["steps"]) == ([3], [{"at": SLOW, "worse": True}])
    assert chart["values"] == [one.value for one in series.points]
    backwards = [*series.points[11:], *series.points[:11]]
    chart = make_case_chart(judge({}, backwards, 22, MEASURES["device"]), MEASURES["device"], HistoryFilter(), {})
    assert chart["x"] == sorted(one.created for one in backwards)
    assert chart["values"] == [one.value for one in series.points]


def test_chart_omits_samples_without_start_time():
    times, values = [3.0, None, 1.0], [30.0, 20.0, 10.0]
    chart = make_plain_chart(
        "time",
        "ns",
        times,
        values,
        [0, 1, 2],
        [],
        1,
        ["fail", "error", "pass"],
        [0, 1],
        bars=[[29.0, 19.0, 9.0], [31.0, 21.0, 11.0]],
        names=["c", "b", "a"],
        confirmed=[1, 2],
    )
    assert (chart["x"], chart["values"], chart["kinds"]) == ([1.0, 3.0], [10.0, 30.0], ["pass", "fail"])
    assert (chart["bars"], chart["names"]) == ([[9.0, 29.0], [11.0, 31.0]], ["a", "c"])
    assert (chart["remarks"], chart["confirmed"], chart["untimed"]) == ([1], [0], 1)


def test_history_marks_single_flip_of_failing_case(database):
    identity = list_identities(database, HistoryFilter(case="broken", board="sim"))[0][0]
    series = read_series(database, "broken", identity, MEASURES["device"])
    assert (series.flips, series.steps) == ([BROKEN], [])


def test_regressions_list_broken_and_slower_cases(database):
    befores, afters = range(SLOW - 5, SLOW), range(SLOW, SLOW + 5)
    found = list_regressions(database, RegressionFilter(since="2020-01-01")).found
    assert [(one.case, one.what, one.over, one.compare) for one in found] == [
        ("broken", "broke", False, "a=night-16&b=night-17"),
        ("slow", "slower", False, "&".join([*(f"a=night-{n:02}" for n in befores), *(f"b=night-{n}" for n in afters)])),
    ]
    assert list_regressions(database, RegressionFilter(since="2020-01-01", what="broke")).total == 1
    assert list_regressions(database, RegressionFilter()).total == 0
    assert parse_since("1970-01-02") == DAY
    with pytest.raises(UsageError, match="invalid date"):
        parse_since("yesterday")


def test_regressions_exclude_outlier_session(tmp_path):
    """The comparison uses enough sessions for an interval and omits the outlier."""
    times = [20.15, 20.2, 20.25, 24.24, 21.75, 21.8, 21.74, 21.75]
    for number, time in enumerate(times):
        one = {"iterations": 20, "device_p50_ns": time * 1e6, "device_p90_ns": time * 1e6}
        write_suite(tmp_path, f"s{number}", [one], started=1.7e9 + number)
    with asking(tmp_path) as client:
        compare = "/compare?a=s0&amp;a=s1&amp;a=s2&amp;b=s4&amp;b=s5&amp;b=s6&amp;b=s7"
        for page in ("/history/regressions?since=2020-01-01", "/history?case=case"):
            assert f'{compare}">compare 3 sessions before with 4 since' in client.get(page).text
        assert "by interval" in client.get("/compare.csv?" + compare.partition("?")[2].replace("&amp;", "&")).text


def test_regressions_mark_fixed_and_drop_deleted_cases(tmp_path):
    runs = tmp_path / "runs"
    for number, outcome in enumerate(["PASS", "FAIL", "SKIP", "PASS"]):
        write_suite(runs, f"s{number}", [{"outcome": outcome}], started=1.7e9 + number)
    with IndexWriter(tmp_path / "index.sqlite") as writer:
        indexer = Indexer(writer, [runs])
        indexer.scan()
        reader = IndexReader(tmp_path / "index.sqlite")
        with reader.open_snapshot() as database:
            (one,) = list_regressions(database, RegressionFilter(since="2020-01-01")).found
            assert (one.over, one.compare) == (True, "a=s0&b=s1")
        (runs / "s1" / "suite.json").unlink()
        (runs / "s1" / "results.jsonl").unlink()
        indexer.scan()
        indexer.scan()
        with reader.open_snapshot() as database:
            assert not list_regressions(database, RegressionFilter(since="2020-01-01")).found


def test_case_that_no_longer_reaches_a_board_is_newly_failing_until_it_passes(tmp_path):
    runs = tmp_path / "runs"
    # A case that fails to compile has no board.
    early = {"outcome": "COMPILE_ERROR", "board": ""}
    for number, case in enumerate([{"board": "evk1"}, early, early]):
        write_suite(runs, f"s{number}", [case], started=1.7e9 + number, boards=["evk1"])
    write_suite(runs, "other", [{"board": "rpi5"}], started=1.7e9 + 9, boards=["rpi5"])
    with IndexWriter(tmp_path / "index.sqlite") as writer:
        indexer = Indexer(writer, [runs])
        indexer.scan()
        reader = IndexReader(tmp_path / "index.sqlite")
        with reader.open_snapshot() as database:
            (one,) = list_regressions(database, RegressionFilter(since="2020-01-01")).found
            assert (one.what, one.over, one.compare) == ("broke", False, "a=s0&b=s1")
        write_suite(runs, "s3", [{"board": "evk1"}], started=1.7e9 + 3, boards=["evk1"])
        indexer.scan()
        indexer.scan()
        with reader.open_snapshot() as database:
            (one,) = list_regressions(database, RegressionFilter(since="2020-01-01")).found
            assert one.over


def test_case_that_waited_for_a_lost_board_is_not_newly_failing(tmp_path):
    for number, case in enumerate([{"board": "evk1"}, {"outcome": "BOARD_LOST", "board": ""}]):
        write_suite(tmp_path, f"s{number}", [case], started=1.7e9 + number, boards=["evk1"])
    with asking(tmp_path) as client, client.app.state.site.reader.open_snapshot() as database:
        assert not list_regressions(database, RegressionFilter(since="2020-01-01")).found
        (identity, _), *_ = list_identities(database, HistoryFilter(case="case"))
        assert [one.outcome for one in read_series(database, "case", identity, MEASURES["device"]).points] == ["PASS"]


def test_history_of_board_has_cases_that_failed_before_they_reached_it(tmp_path):
    early = {"outcome": "COMPILE_ERROR", "ended": "COMPILE_ERROR", "board": ""}
    for number, (case, board) in enumerate([({"board": "evk1"}, "evk1"), (early, "evk1"), (early, "rpi5")]):
        write_suite(tmp_path, f"s{number}", [case], started=1.7e9 + number, boards=[board])
    with asking(tmp_path) as client, client.app.state.site.reader.open_snapshot() as database:
        (identity, _), *_ = list_identities(database, HistoryFilter(case="case"))
        found = read_series(database, "case", identity, MEASURES["device"])
    assert identity["board"] == "evk1"
    assert [one.outcome for one in found.points] == ["PASS", "COMPILE_ERROR"] and found.flips == [1]


def test_suite_history_shows_pass_rate_and_time(database):
    found = read_suite(database, "models", "iree", "sim")
    assert [one.passed for one in found.samples] == [3] * BROKEN + [2] * (22 - BROKEN)
    assert found.rate.steps == [BROKEN]
    assert found.usual_cases == 3 and all(one.device_ns for one in found.samples)


def test_history_skips_times_of_single_iteration(tmp_path):
    runs = tmp_path / "runs"
    for number in range(12):
        write_suite(
            runs,
            f"s{number:02d}",
            [{"device_p50_ns": 1e5 * (1 + number), "iterations": 1}],
            started=1.7e9 + number,
        )
    with asking(runs) as client:
        assert "No comparable samples" in client.get("/history?case=case").text


def test_history_pages_handle_valid_and_invalid_queries(tmp_path):
    runs = tmp_path / "runs"
    nightly(runs)
    write_run(runs, "r", [{"name": "<b>&", "device": {"p50_ns": "nan", "iterations": 9}}])
    with asking(runs) as client:
        for query in (
            "",
            "q=slo",
            "case=slow",
            "case=slow&x=commit",
            "case=slow&x=session&what=abs",
            "case=slow&x=hil",
        ):
            assert client.get(f"/history?{query}").status_code == 200, query
        for day in ("0001-01-01", "0500-01-01", "1970-01-01", "9999-12-31"):
            assert client.get(f"/history/regressions?since={day}").status_code == 200, day
        for query in ("suite=models&flow=iree&board=sim&page=7", "case=%3Cb%3E%26", "case=slow&x=hil&page=9"):
            answer = client.get(f"/history?{query}")
            assert answer.status_code == 200 and "<b>&" not in answer.text, query
        for query in ("case=none", "suite=none", "case=slow&board=none"):
            assert client.get(f"/history?{query}").status_code == 404, query
        for query in ("?case=slow&what=none", "?page=x", "/regressions?since=none", "/regressions?what=none"):
            assert client.get(f"/history{query}").status_code == 400, query
        page = client.get("/history/regressions?since=2020-01-01").text
        assert "newly failing" in page and "a=night-13&amp;b=night-14" in page
        assert "/history?case=slow" in client.get("/case?id=night-01&case=slow").text


def test_annotation_requires_token_and_survives_restart(tmp_path):
    runs = tmp_path / "runs"
    nightly(runs, 2)
    form = {"session": "night-01", "case": "slow", "text": "new <fan>", "suite": "models", "place": "/nets"}
    with asking(runs, token="secret") as client:
        assert client.post("/history/annotate", data=form).status_code == 403
        assert ">Save<" not in client.get("/history?case=slow").text
        client.headers["authorization"] = "Bearer secret"
        answer = client.post("/history/annotate", data=form, follow_redirects=False)
        back = "/history?case=slow&suite=models&place=%2Fnets"
        assert (answer.status_code, answer.headers["location"]) == (303, back)
        assert "new &lt;fan&gt;" in client.get("/history?case=slow").text
        assert "new &lt;fan&gt;" not in client.get("/history?case=steady").text
        for wrong in ({"text": " "}, {"text": "x" * 501}, {"session": "none"}, {"root": "7"}):
            assert client.post("/history/annotate", data={**form, **wrong}).status_code == 404, wrong
    with asking(runs) as client:
        assert "new &lt;fan&gt;" in client.get("/history?case=slow").text


def test_annotation_correction_and_removal_require_token(tmp_path):
    runs = tmp_path / "runs"
    nightly(runs, 2)
    annotate(runs, "night-01", "slow", "the fan")
    annotate(runs, "night-01", "", "new kernel")
    first, second = read_annotations([runs])
    form = {"session": "night-01", "case": "slow", "corrects": first.id, "text": "the <pump>"}
    with asking(runs, token="secret") as client:

        def page() -> str:
            return client.get("/history?case=slow").text

        assert client.post("/history/annotate", data=form).status_code == 403
        client.headers["authorization"] = "Bearer secret"
        assert page().count(">Delete<") == 2 and f'value="{first.id}"' in page()
        away = {"origin": "http://elsewhere.example"}
        assert client.post("/history/annotate", data=form, headers=away).status_code == 403
        assert client.post("/history/annotate", data=form, follow_redirects=False).status_code == 303
        assert "the &lt;pump&gt;" in page() and "the fan" not in page() and "new kernel" in page()
        for wrong in ({"text": " "}, {"text": "x" * 501}, {"corrects": "0" * 16}):
            assert client.post("/history/annotate", data={**form, **wrong}).status_code == 404, wrong
        assert client.post("/history/annotate", data={**form, "remove": "1"}).status_code == 200
        assert "pump" not in page() and "new kernel" in page()
        assert client.post("/history/annotate", data=form).status_code == 404  # the remark was removed
    with asking(runs) as client:
        assert ">Delete<" not in client.get("/history?case=slow").text
    assert read_annotations([runs]) == [second]
    assert "the fan" in (runs / NAME).read_text() and "pump" in (runs / NAME).read_text()


def test_annotation_correction_preserves_identity(tmp_path):
    annotate(tmp_path, "s", "case", "a")
    (one,) = read_annotations([tmp_path])
    for told in ("b", "c"):
        correct_remark(tmp_path, one.id, told)
    (now,) = read_annotations([tmp_path])
    assert (now.id, now.session, now.case, now.text, now.created) == (one.id, "s", "case", "c", one.created)
    assert now.corrected and one.corrected is None


def test_annotations_skip_damaged_lines(tmp_path):
    annotate(tmp_path, "s", "", "good")
    with (tmp_path / NAME).open("a") as file:
        file.write('{"text": 1e999}\n[]\nnonsense\n{"text": ["x"]}\n')
    assert next(one.text for one in read_annotations([tmp_path, tmp_path / "gone"])) == "good"


def test_annotate_rejects_symlinked_file(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="link outside the runs directory"):
        annotate(tmp_path / "root", "s", "", "remark")
    assert not (tmp_path / "elsewhere").exists()


def test_history_separates_equal_suite_names_by_directory(tmp_path):
    for number, place in enumerate(["/a/nets", "/b/nets", "/a/nets"]):
        write_suite(tmp_path, f"s{number}", [{}], suite="nets", started=1.7e9 + number, place=place)
    with asking(tmp_path) as client:
        assert "Compare with the previous session, 2023-11-14 22:13:20" in client.get("/session?id=s2").text
        assert "suite directory: /a/nets before, /b/nets after" in client.get("/compare?a=s0&b=s1").text
        page = client.get("/history?suite=nets").text
        assert "3 sessions" in page and "in 2 directories" in page
        page = client.get("/history?suite=nets&place=/a/nets").text
        assert "2 sessions" in page and "id=s1" not in page


def test_case_history_marks_changed_stack_and_compares_known_stacks(tmp_path):
    drivers = [None, "1.2", "1.2", "1.3", ""]
    for number, driver in enumerate(drivers):
        case = {"device": {"p50_ns": 1e5, "iterations": 20}}
        stack = [] if driver is None else [{"name": "driver", "version": driver, "source": "config"}]
        info = {"board_id": "x", "stack": stack} if stack else {}
        board = {"name": "sim", "info": info}
        write_run(tmp_path / "hil-runs", f"r{number}", [case], created=1.7e9 + number * DAY, board=board)
    with asking(tmp_path) as client:
        text = client.get("/history?case=model").text
        rows = client.get("/history.csv?case=model").text.splitlines()
        document = client.get("/api/v1/history?case=model").json()
    assert text.count("driver 1.2 -&gt; 1.3") == text.count("driver 1.3 -&gt; unknown") == 1
    assert "1 of them have no usable value (fewer than 5 iterations, or grade F), or no stack of the board" in text
    assert [row.rpartition(",")[2] for row in rows[1:]] == [
        "driver 1.3 -> unknown",
        "driver 1.2 -> 1.3",
        "",
        "",
        "unknown",
    ]
    assert [one["stack"] for one in document["points"]][-2:] == [{"driver": "1.2"}, None]
