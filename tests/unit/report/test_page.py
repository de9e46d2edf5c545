import base64
import json
import zlib
from pathlib import Path

from multitask_rl.cli import main


def test_the_page_holds_the_samples_and_no_text_of_a_run_ends_its_script(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    score = {"step": 1, "task": "sums", "metric": "m", "direction": "higher", "values": [0.0, 1.0]}
    sample = {"step": 1, "task": "sums", "prompt": evil, "response": evil, "reward": 0.5}
    event = {"step": 1, "source": "guard", "kind": "warn", "task": "sums", "reason": evil}
    metrics = [{"step": step, "task/sums/reward_mean": step / 2000} for step in range(2001)]
    for name, lines in {"evaluations": [score], "rollouts": [sample], "events": [event]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    page = tmp_path / "page.html"

    assert main(["report", str(tmp_path), "--html", str(page)]) == 0

    text = page.read_text()
    assert text.count("</script>") == 2
    assert "alert(1)</script>" not in text
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert json.loads(zlib.decompress(base64.b64decode(data["samples"])))[0]["response"] == evil
    assert data["alarms"][0]["reason"] == evil
    curve = data["curves"]["reward_mean"]["sums"]
    assert len(curve) <= 401
    assert curve[-1] == [2000, 1.0]
