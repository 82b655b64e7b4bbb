"""Layouts for tests, with names and keys: case("pipe 2 data 2 tensor 2", "gpt2", schedule="gpipe", zero=2)."""

from typing import NamedTuple

from conftest import small

OPTIMIZER = {"offload_optimizer": "host"}
PARAMS = OPTIMIZER | {"offload_params": "host"}
ACTIVATIONS = {"offload_activations": "host"}
ALL = PARAMS | ACTIVATIONS
WORDS = {  # keys of the section memory, by what is in host memory
    "optimizer": OPTIMIZER,
    "params": PARAMS,
    "activations": ACTIVATIONS,
    "all": ALL,
}


class Case(NamedTuple):
    """Mesh axes and their sizes in words, and further keys of a config; as a str, the id of a test."""

    layout: str
    family: str
    remat: str
    parallel: dict
    model: dict

    def __str__(self):
        keys = [f"{key}={value}" for key, value in (self.parallel | self.model).items()]
        return " ".join([self.layout, *keys, self.family, *([self.remat] if self.remat != "none" else [])])

    def tree(self, **sections):
        """The small config of conftest with this layout, as plain data; sections=dict overrides it."""
        words = self.layout.split()
        axes = {axis: int(size) for axis, size in zip(words[::2], words[1::2], strict=True)}
        parallel = {"data": 1} | axes | self.parallel | sections.pop("parallel", {})
        model = self.model | sections.pop("model", {})
        return small(self.family, model=model, parallel=parallel, memory={"remat": self.remat}, **sections)


def case(layout, family="llama", remat="none", model=None, **parallel):
    """layout: mesh axes and their sizes; axes without a size have 1 device. parallel: further keys of that section."""
    return Case(layout, family, remat, parallel, model or {})
