"""Every metric of router and verifier, declared once. docs/reference/metrics.md follows this file.

A snapshot is a flat ``dict[str, float]``: the declared name, with labels written as ``name{pos="1"}`` where there are
any (``Metric.sample`` writes it). The exposition puts ``eagle2_`` before every name. Names follow vLLM where it has
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NAMESPACE = "eagle2"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. ``buckets`` are the upper bounds of a histogram, ascending, without infinity."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def sample(self, suffix: str = "", **labels: object) -> str:
        """The key of one value in a snapshot. The labels must be the declared ones (``le`` too in a bucket)."""
        declared = (*self.labels, "le") if suffix == "_bucket" else self.labels
        assert set(labels) == set(declared), f"{self.name} has the labels {declared}, not {tuple(labels)}"
        if not labels:
            return self.name + suffix
        pairs = ",".join(f'{name}="{_escape(str(labels[name]))}"' for name in declared)
        return f"{self.name}{suffix}{{{pairs}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)

# Router
REQUESTS = Metric("requests_total", "counter", "HTTP requests answered.", ("endpoint", "status"))
REQUESTS_ABORTED = Metric(
    "requests_aborted_total", "counter", "Generations that the client's side ended early.", ("endpoint", "reason")
)
STREAM_ERRORS = Metric("stream_errors_total", "counter", "Streams that ended in an error event.", ("endpoint",))
ROUTER_REQUESTS_RUNNING = Metric("router_requests_running", "gauge", "Generations that this router is serving.")
TIME_TO_FIRST_TOKEN = Metric(
    "time_to_first_token_seconds", "histogram", "From a parsed request to its first commit.", ("endpoint",), _SECONDS
)
REQUEST_SECONDS = Metric(
    "e2e_request_latency_seconds", "histogram", "From a parsed request to its end.", ("endpoint",), _SECONDS
)
VERIFIER_UP = Metric("verifier_up", "gauge", "1 when a verifier answered this scrape, else 0.")

# Admission and placement
QUEUE_DEPTH = Metric("router_queue_depth", "gauge", "Requests that wait for a place in the fleet.", ("priority",))
QUEUE_SECONDS = Metric(
    "router_queue_seconds", "histogram", "How long admitted requests waited for their place.", ("priority",), _SECONDS
)
EXPECTED_WAIT_SECONDS = Metric(
    "router_expected_wait_seconds", "gauge", "What an interactive request of a new tenant would wait now."
)
QUEUED_WORK_SECONDS = Metric(
    "router_queued_work_seconds", "gauge", "What the waiting requests would keep one place of the fleet busy."
)
IN_FLIGHT_WORK_SECONDS = Metric(
    "router_in_flight_work_seconds", "gauge", "What the admitted requests were expected to take, together."
)
PLACES = Metric("router_places", "gauge", "Sequences that this router may have in flight.")
PLACES_HELD = Metric("router_places_held", "gauge", "Places that admitted requests hold.")
REFUSALS = Metric("router_refusals_total", "counter", "Requests that admission turned away.", ("reason",))
PLACEMENTS = Metric("router_placements_total", "counter", "Attempts by what chose their replica.", ("reason",))
QUOTA_REFUSALS = Metric(
    "router_quota_refusals_total", "counter", "Requests refused since their key had used up its minute.", ("limit",)
)
QUOTA_FALLBACKS = Metric(
    "router_quota_fallbacks_total", "counter", "Times that shared quotas did not answer and this router counted alone."
)
LOAD_REPORTS_FAILED = Metric(
    "router_load_reports_failed_total", "counter", "Times that other routers could not be told of requests in flight."
)

# Failover
FAILOVERS = Metric("router_failovers_total", "counter", "Attempts whose replica let them down.", ("reason",))
RETRIES_REFUSED = Metric(
    "router_retries_refused_total",
    "counter",
    "Requests that were given up though they might have gone on.",
    ("reason",),
)
STREAMS_RESUMED = Metric(
    "router_streams_resumed_total", "counter", "Answers that went on elsewhere behind tokens already sent."
)
STALL_SECONDS = Metric(
    "router_failover_stall_seconds",
    "histogram",
    "The gap that a client saw when its answer went on elsewhere.",
    (),
    _SECONDS,
)
SUSPECTS = Metric("router_suspects_total", "counter", "Requests that were in flight on a replica when it crashed.")
REQUESTS_QUARANTINED = Metric(
    "router_requests_quarantined_total", "counter", "Requests refused because they crash verifiers."
)
SESSION_STORE_UP = Metric("router_session_store_up", "gauge", "1 while the session store answers, else 0.")

ROUTER_METRICS = (
    REQUESTS,
    REQUESTS_ABORTED,
    STREAM_ERRORS,
    ROUTER_REQUESTS_RUNNING,
    TIME_TO_FIRST_TOKEN,
    REQUEST_SECONDS,
    VERIFIER_UP,
    QUEUE_DEPTH,
    QUEUE_SECONDS,
    EXPECTED_WAIT_SECONDS,
    QUEUED_WORK_SECONDS,
    IN_FLIGHT_WORK_SECONDS,
    PLACES,
    PLACES_HELD,
    REFUSALS,
    PLACEMENTS,
    QUOTA_REFUSALS,
    QUOTA_FALLBACKS,
    LOAD_REPORTS_FAILED,
    FAILOVERS,
    RETRIES_REFUSED,
    STREAMS_RESUMED,
    STALL_SECONDS,
    SUSPECTS,
    REQUESTS_QUARANTINED,
    SESSION_STORE_UP,
)

# Verifier and its pair
NUM_REQUESTS_RUNNING = Metric("num_requests_running", "gauge", "Sequences in the batch.")
NUM_REQUESTS_WAITING = Metric("num_requests_waiting", "gauge", "Sequences that wait for a place in the batch.")
REQUEST_SUCCESS = Metric("request_success_total", "counter", "Sequences that ended on their own.", ("finished_reason",))
NUM_REQUESTS_ABORTED = Metric("num_requests_aborted_total", "counter", "Sequences ended because their reader left.")
NUM_REQUESTS_FAILED = Metric("num_requests_failed_total", "counter", "Sequences that ended in an error.")
NUM_PREEMPTIONS = Metric(
    "num_preemptions_total", "counter", "Sequences put back for want of slots, or for interactive ones."
)
PROMPT_TOKENS = Metric("prompt_tokens_total", "counter", "Prompt tokens taken in.")
CACHED_PROMPT_TOKENS = Metric("prompt_tokens_cached_total", "counter", "Prompt tokens found in the cache.")
PREFILL_TOKENS = Metric(
    "prefill_tokens_total", "counter", "Tokens that the target read before it could decode; a cached prefix saves them."
)
PREFIX_CACHE_QUERIES = Metric("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache.")
PREFIX_CACHE_HITS = Metric("prefix_cache_hits_total", "counter", "Tokens found in the prefix cache.")
PREFIX_CACHE_EVICTIONS = Metric("prefix_cache_evictions_total", "counter", "Tokens that the prefix cache gave up.")
GENERATION_TOKENS = Metric("generation_tokens_total", "counter", "Tokens committed.")
CYCLES = Metric("cycles_total", "counter", "Steps of the batch.")
NUM_DRAFTS = Metric("spec_decode_num_drafts_total", "counter", "Trees that the target verified.")
NUM_DRAFT_TOKENS = Metric("spec_decode_num_draft_tokens_total", "counter", "Drafted tokens that were verified.")
NUM_ACCEPTED_TOKENS = Metric(
    "spec_decode_num_accepted_tokens_total", "counter", "Drafted tokens accepted, the bonus not counted."
)
NUM_ACCEPTED_TOKENS_PER_POS = Metric(
    "spec_decode_num_accepted_tokens_per_pos_total", "counter", "Trees accepted at least this deep.", ("pos",)
)
MEAN_ACCEPTANCE_LENGTH = Metric(
    "spec_decode_mean_acceptance_length", "gauge", "Committed tokens by cycle, over the newest trees."
)
LOW_ACCEPTANCE = Metric(
    "spec_decode_low_acceptance", "gauge", "1 while drafting hardly helps (mean acceptance length under 1.05)."
)
PROPOSER_UP = Metric("proposer_up", "gauge", "1 while a proposer is paired, else 0.")
PAIRINGS = Metric("pairings_total", "counter", "Times that a proposer was paired.")
STALE_REPLIES = Metric("stale_replies_total", "counter", "Draft replies dropped as late, doubled or foreign.")
DRAFT_TIMEOUTS = Metric("draft_timeouts_total", "counter", "Steps that waited for their trees in vain.")
NON_FINITE_DRAFTS = Metric("non_finite_drafts_total", "counter", "Trees missing because of a NaN or infinity.")
FALLBACK_SECONDS = Metric("fallback_seconds_total", "counter", "Time decoded plainly for want of a proposer.")
OVERLAPPED_STEPS = Metric(
    "overlapped_steps_total", "counter", "Steps during which the proposer drafted for the other half of the batch."
)
OVERLAP_TRIALS = Metric(
    "overlap_trials_total", "counter", "Times that halves, or the whole batch, were tried for a few steps."
)
DRAFT_SECONDS = Metric("draft_seconds_total", "counter", "Time that steps waited for their trees.")
DRAFT_ROWS_SENT = Metric("draft_rows_sent_total", "counter", "Head rows whose features the proposer was sent.")
DRAFT_ROWS_FOUND = Metric(
    "draft_rows_found_total", "counter", "Head rows that the proposer had kept of earlier texts that began alike."
)
VERIFY_SECONDS = Metric("verify_seconds_total", "counter", "Time in the target's forward pass.")
TREE_BUDGET_DEPTH = Metric(
    "tree_budget_depth", "gauge", "Depth of the trees that the budget chose last; 0 while plain decoding pays more."
)
TREE_BUDGET_TOP_K = Metric("tree_budget_top_k", "gauge", "The same for top_k.")
TREE_BUDGET_PRUNED = Metric("tree_budget_pruned_total", "counter", "Drafted nodes that were not worth verifying.")
TREE_BUDGET_PLAIN_STEPS = Metric(
    "tree_budget_plain_steps_total", "counter", "Steps without trees because plain decoding paid more."
)
TREE_BUDGET_SURVEYS = Metric(
    "tree_budget_surveys_total", "counter", "Steps that drafted the largest trees to see whether they pay."
)
TREE_BUDGET_VERIFY_SECONDS = Metric(
    "tree_budget_verify_seconds", "gauge", "What a step of the target takes, by its rows.", ("rows",)
)
TREE_BUDGET_DRAFT_SECONDS = Metric(
    "tree_budget_draft_seconds", "gauge", "What a forward pass of the draft head takes, by its rows.", ("rows",)
)
TREE_BUDGET_CALIBRATION = Metric(
    "tree_budget_calibration", "gauge", "Share of nodes accepted, by their drafted probability at most.", ("drafted",)
)
KV_SLOTS_USED = Metric("kv_slots_used", "gauge", "KV slots that sequences hold.", ("side",))
KV_SLOTS_CACHED = Metric(
    "kv_slots_cached", "gauge", "KV slots that are kept for their prefixes alone and can be had.", ("side",)
)
KV_SLOTS_CAPACITY = Metric("kv_slots_capacity", "gauge", "KV slots there are.", ("side",))

VERIFIER_METRICS = (
    NUM_REQUESTS_RUNNING,
    NUM_REQUESTS_WAITING,
    REQUEST_SUCCESS,
    NUM_REQUESTS_ABORTED,
    NUM_REQUESTS_FAILED,
    NUM_PREEMPTIONS,
    PROMPT_TOKENS,
    CACHED_PROMPT_TOKENS,
    PREFILL_TOKENS,
    PREFIX_CACHE_QUERIES,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_EVICTIONS,
    GENERATION_TOKENS,
    CYCLES,
    NUM_DRAFTS,
    NUM_DRAFT_TOKENS,
    NUM_ACCEPTED_TOKENS,
    NUM_ACCEPTED_TOKENS_PER_POS,
    MEAN_ACCEPTANCE_LENGTH,
    LOW_ACCEPTANCE,
    PROPOSER_UP,
    PAIRINGS,
    STALE_REPLIES,
    DRAFT_TIMEOUTS,
    NON_FINITE_DRAFTS,
    FALLBACK_SECONDS,
    OVERLAPPED_STEPS,
    OVERLAP_TRIALS,
    DRAFT_SECONDS,
    DRAFT_ROWS_SENT,
    DRAFT_ROWS_FOUND,
    VERIFY_SECONDS,
    TREE_BUDGET_DEPTH,
    TREE_BUDGET_TOP_K,
    TREE_BUDGET_PRUNED,
    TREE_BUDGET_PLAIN_STEPS,
    TREE_BUDGET_SURVEYS,
    TREE_BUDGET_VERIFY_SECONDS,
    TREE_BUDGET_DRAFT_SECONDS,
    TREE_BUDGET_CALIBRATION,
    KV_SLOTS_USED,
    KV_SLOTS_CACHED,
    KV_SLOTS_CAPACITY,
)

METRICS = ROUTER_METRICS + VERIFIER_METRICS
