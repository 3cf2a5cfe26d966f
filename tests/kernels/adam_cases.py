"""What a step of Adam reads and writes, as one value, and the step as the papers write it."""

from dataclasses import dataclass, replace

import torch

from fastbrain.kernels import AdamScalars

# below, at and above a block, none and many
MANY = [(1,), (1023,), (1024,), (1025,), (3, 700), (0,), (5,)]
LISTS = ("params", "grads", "exp_avgs", "exp_avg_sqs", "shadows")


@dataclass
class Case:
    """Everything that a step of Adam reads and writes."""

    params: list
    grads: list
    exp_avgs: list
    exp_avg_sqs: list
    shadows: list
    weight_decays: list
    lr: float = 1e-3
    grad_scale: float = 1.0
    clip: float = 1.0
    step: int = 0
    skip: int = 0
    betas: tuple = (0.9, 0.999)
    eps: float = 1e-8

    def copy(self, dtype=None):
        """The same numbers elsewhere; `dtype` is that of everything but the shadows."""
        lists = {name: [x.detach().clone() for x in getattr(self, name)] for name in LISTS}
        for name in LISTS[:-1] if dtype else ():
            lists[name] = [x.to(dtype) for x in lists[name]]
        return replace(self, **lists)

    def stepped(self, twin):
        """A copy after one step."""
        after = self.copy()
        after.run(twin)
        return after

    def stepped_in_place(self, twin):
        """This one after a step: a copy would lie elsewhere in memory."""
        self.run(twin)
        return self

    def run(self, twin):
        scalars = self.scalars()
        self.launch(twin, scalars)
        self.step = int(scalars.step)

    def scalars(self):
        device = self.params[0].device
        return AdamScalars(
            *(torch.tensor(getattr(self, n), device=device) for n in ("lr", "grad_scale", "clip")),
            torch.tensor(self.step, device=device),
            torch.tensor(self.skip, dtype=torch.int32, device=device),
        )

    def launch(self, twin, scalars):
        twin.adam_step(
            *(getattr(self, name) for name in LISTS),
            scalars,
            betas=self.betas,
            eps=self.eps,
            weight_decays=self.weight_decays,
        )

    def bits(self):
        """Every tensor and the count, as bytes that can be compared, NaN included."""
        tensors = [x for name in LISTS for x in getattr(self, name)]
        return [x.contiguous().view(torch.uint8).tolist() for x in tensors if x.dim()], self.step


def by_formula(case):
    """The case after one step as the papers write it, in the dtype of the parameters."""
    b1, b2 = case.betas
    t = case.step + 1
    lr, factor = rounded(case.lr), rounded(case.grad_scale) * rounded(case.clip)
    after = case.copy()
    for i, decay in enumerate(case.weight_decays):
        p, g = case.params[i], case.grads[i]
        g = (g.to(p.dtype) if g.numel() else torch.zeros_like(p)) * factor
        m = b1 * case.exp_avgs[i] + (1 - b1) * g
        v = b2 * case.exp_avg_sqs[i] + (1 - b2) * g**2
        p = p - lr * decay * p
        p = p - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + case.eps)
        after.params[i], after.exp_avgs[i], after.exp_avg_sqs[i] = p, m, v
    return after


def rounded(value):
    """The scalars are FP32 on the device."""
    return float(torch.tensor(value, dtype=torch.float32))


def make_case(device, *shapes, **settings):
    """Parameters as small as an update, so that an error in the update is no small error."""
    shapes = shapes or ((5, 3), (7,))
    randn = [[torch.randn(shape, device=device) for shape in shapes] for _ in ("p", "g", "m", "v")]
    n = len(shapes)
    defaults = {
        "params": [1e-3 * p for p in randn[0]],
        "grads": randn[1],
        "exp_avgs": [0.1 * m for m in randn[2]],
        "exp_avg_sqs": [0.01 * v**2 for v in randn[3]],
        "shadows": [torch.zeros(s, dtype=torch.bfloat16, device=device) for s in shapes],
        "weight_decays": [0.0] * n,
    }
    return Case(**defaults | settings)
