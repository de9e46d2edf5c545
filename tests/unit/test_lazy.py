"""What the imports of a run leave out."""

from pathlib import Path

from forked import run_forked


def test_a_process_that_trains_has_models_without_scikit_learn(tmp_path: Path) -> None:
    (tmp_path / "look.py").write_text(
        "import importlib.util, sys\n"
        "assert 'transformers.models.qwen2.modeling_qwen2' in sys.modules\n"
        "assert 'sklearn' not in sys.modules\n"
        "from transformers.utils import is_sklearn_available\n"
        "assert is_sklearn_available() == (importlib.util.find_spec('sklearn') is not None)\n"
    )
    ended = run_forked("look.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
