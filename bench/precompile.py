# SPDX-License-Identifier: Apache-2.0
"""Fills Inductor's cache from several processes before anything is timed.

Compiling one after the other takes longer than all measurements together. The helpers' own choice among a
kernel's configurations, made on a busy device, is not kept: the timing process chooses again, from compiled
kernels.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time

from cases import Case

Job = tuple[Case, str, str]  # case, dtype, activation
MAX_WORKERS = 12
WORTHWHILE = 4  # fewer jobs than this are not worth the start of a process


def compile_job(job: Job, device: str = "cuda") -> None:
    import torch
    import torch._inductor.config

    from steadynorm.bench import arms

    torch._inductor.config.autotune_local_cache = False
    torch._dynamo.reset()
    case, dtype, activation = job
    o = arms.operands(case, dtype, activation, device)
    arms.training_step(arms._inductor(), o)
    if device == "cuda":
        torch.cuda.synchronize()
        del o
        torch.cuda.empty_cache()


def precompile(jobs: list[Job], seconds: float, device: str = "cuda") -> tuple[int, float]:
    """Compiles `jobs` within `seconds`. What fails or is late is left to the process that times.

    Returns how many were done and the seconds taken.
    """
    workers = min(MAX_WORKERS, len(jobs), (os.cpu_count() or 1) - 1)
    if len(jobs) < WORTHWHILE or workers < 2:
        return 0, 0.0
    began = time.monotonic()
    kept = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # one process a job is enough; inherited by the helpers
    pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    processes = []
    finished = False
    try:
        futures = [pool.submit(compile_job, job, device) for job in jobs]
        processes = list(pool._processes.values())
        finished = not concurrent.futures.wait(futures, timeout=seconds).not_done
    finally:
        if kept is None:
            del os.environ["TORCHINDUCTOR_COMPILE_THREADS"]
        else:
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = kept
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:  # none may share the device with what is timed
            if not finished:
                process.terminate()
            process.join()
    done = sum(future.done() and not future.cancelled() and future.exception() is None for future in futures)
    return done, time.monotonic() - began
