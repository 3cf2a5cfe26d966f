"""Checks and times fastbrain on this machine's GPU, part by part: `bench/device_check.sh`.

Needs Python 3.11, torch, triton, numpy, safetensors and tokenizers, and no installation. Every part
runs in processes of its own, under a budget of seconds: one that fails, hangs or crashes is
reported, and the others run. A case that leaves the GPU unusable costs its process; the part goes
on in a new one. With --dry every line runs at a toy size on the CPU, under Triton's interpreter,
and no time is kept.

The file it writes, `<card>.json`, after every part anew:

    kind        "device check"
    machine     card, driver, torch, triton, python, commit, date, command and more, all text
    parts       by name (see `bench.device_check.parts`):
        status      "passed", "failed", or "over budget": no failure, but not all of it ran
        seconds     that it took, and budget_s, those it could have had
        error       why it ended early, where it did
        left_out    from which case on there was no time, where there was none
        cases       by name; each has `seconds`, and `failed` (a traceback) or `skipped` (a reason)
                    where that is so, and what the part found:

    compiling              processes, and how each ended
    twins, determinism     nothing more
    training               steps, losses by run, worst (largest error over its allowance)
    graphs                 captured, equal_bits, losses
    operations             ms, spread (slowest over fastest round) and errors by contender, bytes
                           and flops of the call, fastest_peer, ratio (its time over ours)
    steps                  shape, tokens of a step, tokens_per_s, spread (fastest over slowest
                           round), peak_bytes (allocated by PyTorch; of graphs, reserved); of
                           fastbrain's own also total_parameters, active_parameters and
                           predicted_tokens_per_s, of its eager steps predicted_peak_bytes
    tests                  summary (pytest's last line)

A case of `steps` is named "<model>, <contender>". Its figures, and those of `ms`, are null in a dry
run, which writes a file only where --out says so.
"""
