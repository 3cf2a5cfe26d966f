"""A damaged checkpoint is refused by name, kept, and the next older one is used."""

from pathlib import Path

import pytest
from training_runs import entered, run

from bench.campaigns.corruption import Campaign
from bench.campaigns.trial import FOREIGN, INTACT, NEWER

OVERRIDES = ("train.max_steps=2", "save.interval_steps=1", "eval.interval=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with entered(tmp_path_factory.mktemp("runs")):
        assert run("run", *OVERRIDES) == 0
        assert run("foreign", *OVERRIDES, "train.seed=7") == 0
        yield Path("run"), Path("foreign")


def damaged(campaign: Campaign, count: int) -> dict:
    campaign.run(count, 0, print)
    found = campaign.result()
    assert not found["failures"]
    assert found["found"] == found["trials"] > count
    fates = {row["fate"] for row in found["kinds"].values()}
    assert fates >= {FOREIGN, INTACT, NEWER}
    return found


def test_damage_of_every_kind_is_found(runs):
    found = damaged(Campaign(*runs), count=60)
    assert found["fall_back_ms"]["longest"] < 5_000


@pytest.mark.slow
def test_a_thousand_flipped_bits_are_found_and_runs_go_on_from_every_kind(runs):
    def resume(path: Path) -> None:
        assert run(str(path), *OVERRIDES, "--resume", "auto") == 0

    found = damaged(Campaign(*runs, resume), count=1_000)
    assert found["resumed"] > 15
