"""Drives the scheduler of an installed vLLM through scripted cases: a worker that answers lines with lines.

Run as a script, under the Python that has the vLLM (any release from 0.24 on), never imported by the simulator. It
imports the standard library, torch and vllm only, the last two by name when the worker starts. It must not know the
simulator: what it writes is what vLLM decided, and nothing else.

No model runs. The driver takes the place of the GPU: a batch comes back with the numbers of accepted drafts that its
case lists. Configurations are built once per process and copied for each case with the case's settings, since
building one takes longer than most cases do.

Protocol, one JSON object a line. The worker first writes ``{"vllm": version, "python": version}``. Then for each line
``{"case": case, "max_turns": n}`` it writes one of

- ``{"trace": trace, "ended": bool, "schedule_s": float, "update_s": float}``: the trace, up to ``max_turns`` turns if
  the case had not ended by then, and the seconds of wall time in vLLM's own ``schedule`` and ``update_from_output``;
- ``{"failed": text, "turn": turn, "rows": [...]}``: vLLM raised in that turn; the rows are those before it.

``driver.py CASE.json[.gz] TRACE.json[.gz] ...`` instead records the traces of the cases named, in pairs.
"""

from __future__ import annotations

import copy
import gzip
import importlib
import json
import logging
import os
import platform
import sys
import tempfile
import time
import zlib
from collections import deque
from typing import Any

_END_TOKEN = 2
_DRAFT_TOKEN = 7
_DEFAULT_MAX_TURNS = 200_000

# The smallest model description that vLLM's configuration accepts; no weights are ever read. Only its end token is
# looked at by the scheduler.
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1 << 20,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": _END_TOKEN,
}


def stream_token(stream: str, position: int) -> int:
    """Token ``position`` of a named stream, as the case format defines it."""
    return 100 + zlib.crc32(f"{stream}:{position}".encode()) % 31000


class Vllm:
    """The parts of one vLLM release that a case needs, looked up once; makes schedulers and requests."""

    def __init__(self) -> None:
        # The second model runner lists a resumed request as a new one; traces follow the first.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        load = importlib.import_module
        self.version = str(load("vllm").__version__)
        self._config = load("vllm.config")
        self._sampling = load("vllm.sampling_params").SamplingParams
        self._request = load("vllm.v1.request").Request
        self._cache = load("vllm.v1.kv_cache_interface")
        self._hashing = load("vllm.v1.core.kv_cache_utils")
        self._sha256 = load("vllm.utils.hashing").sha256
        self._sync = load("vllm.v1.core.sched.scheduler").Scheduler
        self._async = load("vllm.v1.core.sched.async_scheduler").AsyncScheduler
        self._outputs = load("vllm.v1.outputs")
        self.aborted = load("vllm.v1.request").RequestStatus.FINISHED_ABORTED
        self._float32 = load("torch").float32
        self._hashing.init_none_hash(self._sha256)
        self._bases = {drafts: self._build_base(drafts) for drafts in (False, True)}
        structured = load("vllm.v1.structured_output").StructuredOutputManager
        self._structured = structured(self._bases[False])
        logging.disable(logging.WARNING)  # "Failed to reset prefix cache" and the like: the trace says it

    def _build_base(self, drafts: bool) -> Any:
        config = self._config
        length = 1 << 16
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
                json.dump(_MODEL, file)
            model = config.ModelConfig(
                model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float16", max_model_len=length, seed=0
            )
        speculation = None
        if drafts:
            # The drafter is named per case, after construction: naming it here would ask for its weights.
            speculation = config.SpeculativeConfig(
                method="ngram", num_speculative_tokens=1, prompt_lookup_min=1, prompt_lookup_max=1
            )
        return config.VllmConfig(
            model_config=model,
            cache_config=config.CacheConfig(block_size=16),
            scheduler_config=config.SchedulerConfig(
                max_num_seqs=1,
                max_num_batched_tokens=length,
                max_model_len=length,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=False,
            ),
            speculative_config=speculation,
            device_config=config.DeviceConfig("cpu"),
        )

    def scheduler(self, engine: dict[str, Any]) -> Any:
        """A fresh scheduler with the settings of ``engine``."""
        num_drafts = engine.get("num_speculative_tokens", 0)
        vllm_config = copy.copy(self._bases[bool(num_drafts)])
        vllm_config.model_config = copy.copy(vllm_config.model_config)
        vllm_config.model_config.max_model_len = engine["max_model_len"]
        vllm_config.cache_config = cache = copy.copy(vllm_config.cache_config)
        cache.block_size = engine["block_size"]
        cache.enable_prefix_caching = engine["enable_prefix_caching"]
        cache.num_gpu_blocks = engine["num_gpu_blocks"]
        vllm_config.scheduler_config = limits = copy.copy(vllm_config.scheduler_config)
        limits.max_num_seqs = engine["max_num_seqs"]
        limits.max_num_batched_tokens = limits.max_num_scheduled_tokens = engine["max_num_batched_tokens"]
        limits.max_model_len = engine["max_model_len"]
        limits.watermark = engine.get("watermark", 0.0)
        limits.policy = engine.get("policy", "fcfs")
        limits.long_prefill_token_threshold = engine.get("long_prefill_token_threshold", 0)
        limits.async_scheduling = engine["async_scheduling"]
        if num_drafts:
            vllm_config.speculative_config = speculation = copy.copy(vllm_config.speculative_config)
            speculation.method = engine["method"]
            speculation.num_speculative_tokens = num_drafts
            table = engine.get("num_speculative_tokens_per_batch_size")
            speculation.num_speculative_tokens_per_batch_size = [tuple(row) for row in table] if table else None
        spec = self._cache.FullAttentionSpec(
            block_size=engine["block_size"], num_kv_heads=1, head_size=1, dtype=self._float32
        )
        kind = self._async if engine["async_scheduling"] else self._sync
        return kind(
            vllm_config=vllm_config,
            kv_cache_config=self._cache.KVCacheConfig(
                num_blocks=engine["num_gpu_blocks"],
                kv_cache_tensors=[],
                kv_cache_groups=[self._cache.KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=self._structured,
            block_size=engine["block_size"],
            log_stats=False,
        )

    def block_hasher(self, block_size: int) -> Any:
        """What requests of a scheduler with this block size hash their blocks with."""
        return self._hashing.get_request_block_hasher(block_size, self._sha256)

    def request(self, spec: dict[str, Any], hasher: Any) -> Any:
        """The request that the case describes."""
        sampling = self._sampling(max_tokens=spec["max_tokens"])
        sampling.update_from_generation_config({}, eos_token_id=_END_TOKEN)
        return self._request(
            request_id=spec["id"],
            prompt_token_ids=[stream_token(name, i) for name, count in spec["prompt"] for i in range(count)],
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=float(spec["arrival_turn"]),
            priority=spec.get("priority", 0),
            block_hasher=hasher,
        )

    def model_output(self, ids: list[str], tokens: list[list[int]]) -> Any:
        """What a worker hands back for a batch of these requests."""
        return self._outputs.ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def drafts(self, ids: list[str], count: int) -> Any:
        """``count`` drafts for each of these requests."""
        return self._outputs.DraftTokenIds(ids, [[_DRAFT_TOKEN] * count for _ in ids])


class Flight:
    """A batch under way: what was scheduled, and which of its frames sample."""

    def __init__(self, batch: Any, scheduler: Any) -> None:
        self.batch = batch
        self.ids: list[str] = list(batch.num_scheduled_tokens)
        self.num_drafts = {name: len(drafts) for name, drafts in batch.scheduled_spec_decode_tokens.items()}
        self.samples = {name: not scheduler.requests[name].is_prefill_chunk for name in self.ids}


class Drive:
    """One case on its way through one scheduler. ``run`` plays it; ``rows`` holds what has been decided so far."""

    def __init__(self, vllm: Vllm, case: dict[str, Any]) -> None:
        engine = case["engine"]
        self.vllm = vllm
        self.scheduler = vllm.scheduler(engine)
        self.hasher = vllm.block_hasher(engine["block_size"])
        # Not in the format, where it follows from async_scheduling: more batches, as with pipeline parallelism.
        self.depth = engine.get("batches_in_flight") or (2 if engine["async_scheduling"] else 1)
        self.proposes = self.depth == 1 and engine.get("num_speculative_tokens", 0) > 0
        self.script = {spec["id"]: spec for spec in case["requests"]}
        self.arrivals = deque(sorted(case["requests"], key=lambda spec: int(spec["arrival_turn"])))
        self.events = deque(sorted(case.get("events", []), key=lambda event: int(event["turn"])))
        self.num_verified = dict.fromkeys(self.script, 0)
        self.arrived: dict[str, Any] = {}
        self.in_flight: deque[Flight] = deque()
        self.turn = 0
        self.rows: list[dict[str, Any]] = []
        self.schedule_s = self.update_s = 0.0

    def run(self, max_turns: int) -> bool:
        """Play the case to its end, or for ``max_turns`` turns; whether it ended."""
        while self.turn < max_turns:
            if not self._one_turn():
                return True
            self.turn += 1
        return False

    def trace(self) -> dict[str, Any]:
        """What has been decided so far."""
        return {"turns": self.rows, "summary": self._summary()}

    def _one_turn(self) -> bool:
        """Play a turn; False when the case is over with it."""
        applied = self._apply_events()
        self._add_arrivals()
        something_due = bool(self.arrivals or self.events)
        if not self.scheduler.has_unfinished_requests() and not self.in_flight:
            if applied:
                self.rows.append({"turn": self.turn, "events": applied, "free_blocks": self._num_free()})
            return something_due
        row: dict[str, Any] = {"turn": self.turn}
        if applied:
            row["events"] = applied
        launched = self.scheduler.has_requests() and self._schedule(row)
        took_back = bool(self.in_flight) and not (launched and len(self.in_flight) < self.depth)
        if took_back:
            self._take_back(row)
        row["waiting"] = self._waiting()
        self.rows.append(row)
        stuck = not launched and not took_back and not self.in_flight and not something_due
        return not (stuck and self.scheduler.has_unfinished_requests())

    def _apply_events(self) -> list[dict[str, Any]]:
        applied = []
        while self.events and self.events[0]["turn"] <= self.turn:
            event = self.events.popleft()
            if event["type"] == "abort":
                self.scheduler.finish_requests(event["id"], self.vllm.aborted)
                applied.append(event)
            else:
                done = self.scheduler.reset_prefix_cache(reset_running_requests=event["reset_running_requests"])
                applied.append({**event, "done": bool(done)})
        return applied

    def _add_arrivals(self) -> None:
        while self.arrivals and self.arrivals[0]["arrival_turn"] <= self.turn:
            spec = self.arrivals.popleft()
            self.arrived[spec["id"]] = request = self.vllm.request(spec, self.hasher)
            self.scheduler.add_request(request)

    def _schedule(self, row: dict[str, Any]) -> bool:
        """Schedule, note it in the row, and launch the batch if it holds a token."""
        start = time.perf_counter()
        batch = self.scheduler.schedule()
        self.schedule_s += time.perf_counter() - start
        launched = bool(batch.total_num_scheduled_tokens > 0)
        drafts = batch.scheduled_spec_decode_tokens
        cached = batch.scheduled_cached_reqs
        row["scheduled"] = {
            name: [count, len(drafts.get(name, ()))] for name, count in batch.num_scheduled_tokens.items()
        }
        row["preempted"] = sorted(batch.preempted_req_ids or ())
        row["admitted"] = {new.req_id: new.num_computed_tokens for new in batch.scheduled_new_reqs}
        row["resumed"] = {
            name: computed
            for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            if name in cached.resumed_req_ids
        }
        row["after_schedule"] = self._running()
        row["free_blocks"] = self._num_free()
        if launched:
            self.in_flight.append(Flight(batch, self.scheduler))
        return launched

    def _take_back(self, row: dict[str, Any]) -> None:
        """The oldest batch comes back from the device that is not there."""
        flight = self.in_flight.popleft()
        tokens = [self._sample(flight, name) for name in flight.ids]
        before = {name: self.arrived[name].num_output_tokens for name in flight.ids}
        unfinished = set(self.scheduler.requests)
        output = self.vllm.model_output(flight.ids, tokens)
        start = time.perf_counter()
        self.scheduler.update_from_output(flight.batch, output)
        self.update_s += time.perf_counter() - start
        if self.proposes:
            proposed_to = [name for name in flight.ids if flight.samples[name]]
            count = flight.batch.num_spec_tokens_to_schedule
            self.scheduler.update_draft_token_ids(self.vllm.drafts(proposed_to, count))
        # The scheduler cuts off what a finished request does not keep, in the lists it was handed.
        row["returned"] = {name: len(kept) for name, kept in zip(flight.ids, tokens, strict=True)}
        row["delivered"] = {name: self.arrived[name].num_output_tokens - before[name] for name in flight.ids}
        row["finished"] = sorted(unfinished.difference(self.scheduler.requests))
        row["after_update"] = self._running()
        row["free_blocks_after_update"] = self._num_free()

    def _sample(self, flight: Flight, name: str) -> list[int]:
        """The tokens that the frame of this request samples."""
        if not flight.samples[name]:
            return []
        spec = self.script[name]
        accepted = 0
        if num_drafts := flight.num_drafts.get(name, 0):
            listed = spec["accepted"]
            accepted = min(listed[self.num_verified[name] % len(listed)], num_drafts)
            self.num_verified[name] += 1
        # Nothing is known of an aborted request any more, and nobody looks at its tokens.
        alive = self.scheduler.requests.get(name)
        first = alive.num_output_tokens if alive is not None else 0
        end = spec.get("eos_at")
        return [
            _END_TOKEN if end is not None and position >= end else stream_token(f"o:{name}", position)
            for position in range(first, first + accepted + 1)
        ]

    def _running(self) -> dict[str, list[Any]]:
        manager = self.scheduler.kv_cache_manager
        return {
            request.request_id: [
                request.num_computed_tokens,
                request.num_tokens,
                request.num_output_placeholders,
                list(manager.get_block_ids(request.request_id)[0]),
            ]
            for request in self.scheduler.running
        }

    def _waiting(self) -> list[str]:
        """Waiting requests in the order in which they are looked at next.

        0.24 to 0.30 keep those that were passed over in a queue of their own; with two batches in flight it is empty.
        """
        requests = list(self.scheduler.waiting)
        if passed_over := list(getattr(self.scheduler, "skipped_waiting", ())):
            requests = passed_over + requests
            if self.scheduler.policy.value == "priority":
                requests.sort()
        return [request.request_id for request in requests]

    def _num_free(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _summary(self) -> dict[str, Any]:
        requests = self.arrived.items()
        summary: dict[str, Any] = {
            "num_output_tokens": {name: request.num_output_tokens for name, request in requests},
            "num_preemptions": {name: request.num_preemptions for name, request in requests},
        }
        if stalled := [name for name, request in requests if not request.is_finished()]:
            summary["stalled"] = stalled
        return summary


def answer(vllm: Vllm, case: dict[str, Any], max_turns: int) -> dict[str, Any]:
    """What the worker writes for a case; the module's docstring lists both forms."""
    drive = None
    try:
        drive = Drive(vllm, case)
        ended = drive.run(max_turns)
    except Exception as error:
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        place = f" at {os.path.basename(frame.tb_frame.f_code.co_filename)}:{frame.tb_lineno}" if frame else ""
        return {
            "failed": f"{type(error).__name__}: {error}{place}",
            "turn": drive.turn if drive else None,
            "rows": drive.rows if drive else [],
        }
    return {"trace": drive.trace(), "ended": ended, "schedule_s": drive.schedule_s, "update_s": drive.update_s}


def _read(path: str) -> Any:
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as file:
        return json.load(file)


def _write(path: str, value: Any) -> None:
    data = json.dumps(value, separators=(",", ":")).encode()
    if path.endswith(".gz"):
        data = gzip.compress(data, 9, mtime=0)
    with open(path, "wb") as file:
        file.write(data)


def main(arguments: list[str]) -> int:
    """Serve lines until the input ends, or record the pairs of files named."""
    # Whatever vLLM prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    vllm = Vllm()
    if arguments:
        status = 0
        for case_path, trace_path in zip(arguments[::2], arguments[1::2], strict=True):
            got = answer(vllm, _read(case_path), _DEFAULT_MAX_TURNS)
            if "trace" in got:
                _write(trace_path, got["trace"])
            else:
                got.pop("rows", None)
                print(f"{case_path}: {got}", file=sys.stderr)
                status = 1
        return status
    print(json.dumps({"vllm": vllm.version, "python": platform.python_version()}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        got = answer(vllm, asked["case"], asked.get("max_turns", _DEFAULT_MAX_TURNS))
        print(json.dumps(got, separators=(",", ":")), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
