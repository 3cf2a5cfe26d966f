"""The command lines that a verb's help shows, to be run as they stand."""

import argparse
import shlex
from collections.abc import Mapping
from types import MappingProxyType, ModuleType

NOWHERE: Mapping[str, str] = MappingProxyType({})


def examples(module: ModuleType, places: Mapping[str, str] = NOWHERE) -> list[list[str]]:
    """The arguments of each line of the form "fastbrain <verb> ..." in the help of a verb.

    What has to exist, by the help's own words, may lie elsewhere: `places` says where.
    """
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    verb = module.__name__.rpartition(".")[2]
    found = []
    for line in str(parser.epilog).splitlines():
        if line.startswith(f"  fastbrain {verb} "):
            words = shlex.split(line)[2:]
            for name, place in places.items():
                words = [word.replace(name, place) for word in words]
            found.append(words)
    assert found, "the help shows how it is called"
    return found
