"""The report of a run as one HTML page: nothing outside it is needed, and no script to read it."""

import base64
import hashlib
from importlib import resources

from fastbrain.training.report.charts import charts
from fastbrain.training.report.files import checkpoints, samples
from fastbrain.training.report.glance import glance, header, when
from fastbrain.training.report.incidents import incidents, starts
from fastbrain.training.report.origins import again, data, machine, settings
from fastbrain.training.report.story import Story
from fastbrain.training.report.words import text


def page(story: Story, now: float) -> str:
    """The page.

    Args:
        story: what the run's directory tells.
        now: seconds since the epoch, for the date.
    """
    script, style = _part("hover.js"), _part("style.css")
    # whatever text a run generated: only this script may run, and nothing may be fetched
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    parts = [
        header(story, now),
        glance(story),
        charts(story),
        incidents(story),
        starts(story),
        checkpoints(story),
        samples(story),
        machine(story),
        data(story),
        settings(story),
        again(story),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(story.run.path.resolve().name)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{''.join(parts)}<footer>fastbrain report, {when(now)}, of "
        f"{text(story.run.path.resolve())}</footer>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _part(name: str) -> str:
    folder = resources.files("fastbrain") / "training" / "report"
    return (folder / name).read_text(encoding="utf-8")
