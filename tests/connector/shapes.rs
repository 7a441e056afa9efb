//! Pairs of engines of different shapes: real worker processes on both sides, real UCX over TCP and over shared memory,
//! every byte of every rank checked, and every rank's reports counted.

use crate::common::cache::{CacheSpec, Loaded};
use crate::common::child::{Ask, Lists, Tell};
use crate::common::engine::{Engine, request};
use kvferry::connector::Transport;
use kvferry::proto::aggregate::Aggregator;
use kvferry::proto::geometry::{Group, GroupKind};
use kvferry::proto::shape::{EngineSpec, GroupSpec, Layout, ModelSpec, PartSpec, Parts};
use kvferry::proto::wire::{Cause, WorkerReport};

struct Pair {
    name: &'static str,
    model: ModelSpec,
    p: EngineSpec,
    d: EngineSpec,
}

fn attention(layers: u32, heads: u32) -> ModelSpec {
    ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..layers, heads, 8, 8)] }
}

/// Full attention in even layers, a window of 24 tokens in odd ones.
fn hybrid(layers: u32, heads: u32) -> ModelSpec {
    partly(GroupKind::SlidingWindow { window: 24 }, layers, heads)
}

fn partly(window: GroupKind, layers: u32, heads: u32) -> ModelSpec {
    let every_other = |first: u32| (first..layers).step_by(2);
    ModelSpec {
        groups: vec![
            GroupSpec::attention(GroupKind::Full, every_other(0), heads, 8, 8),
            GroupSpec::attention(window, every_other(1), heads, 8, 8),
        ],
    }
}

fn mla(layers: u32) -> ModelSpec {
    ModelSpec { groups: vec![GroupSpec::latent(0..layers, 36)] }
}

/// Attention in even layers, a convolution's last columns and an SSM state in odd ones, by channels or whole.
fn mamba(layers: u32, sharded: bool) -> ModelSpec {
    let part = |name: &str, heads: u32, positions: u32, bytes: u64| {
        if sharded {
            PartSpec { name: name.into(), heads, positions, bytes }
        } else {
            PartSpec { name: name.into(), heads: 1, positions, bytes: bytes * u64::from(heads) }
        }
    };
    ModelSpec {
        groups: vec![
            GroupSpec::attention(GroupKind::Full, (0..layers).step_by(2), 4, 8, 8),
            GroupSpec::state((1..layers).step_by(2), vec![part("conv", 12, 3, 4), part("ssm", 4, 1, 40)]),
        ],
    }
}

fn tp(tp: u32) -> EngineSpec {
    EngineSpec { tp, num_blocks: 48, ..EngineSpec::default() }
}

fn pp(pp: u32, tp: u32) -> EngineSpec {
    EngineSpec { pp, ..self::tp(tp) }
}

fn block(size: u32) -> EngineSpec {
    EngineSpec { block_size: vec![size], ..tp(1) }
}

fn layout(layout: Layout, size: u32) -> EngineSpec {
    EngineSpec { layout, block_size: vec![size], ..tp(1) }
}

const TURNED: Layout = Layout::Turned { element: 2 };

#[allow(clippy::too_many_lines)]
fn pairs() -> Vec<Pair> {
    let pair = |name, model, p, d| Pair { name, model, p, d };
    let dcp = |tp: u32, dcp: u32, dcp_interleave: u32| EngineSpec { dcp, dcp_interleave, ..self::tp(tp) };
    vec![
        pair("tp 4 -> 1", attention(2, 4), tp(4), tp(1)),
        pair("tp 1 -> 4", attention(2, 4), tp(1), tp(4)),
        pair("tp 2 -> 3, 6 heads", attention(2, 6), tp(2), tp(3)),
        pair("tp 3 -> 2, 6 heads", attention(2, 6), tp(3), tp(2)),
        pair("tp 4 -> 3, 7 heads that neither divides", attention(1, 7), tp(4), tp(3)),
        pair("pp 2 x tp 2 -> tp 4", attention(4, 4), pp(2, 2), tp(4)),
        pair("tp 2 -> pp 2", attention(4, 4), tp(2), pp(2, 1)),
        pair("pp 2 -> pp 1", attention(3, 2), pp(2, 1), tp(1)),
        pair("pp 1 -> pp 2 x tp 2", attention(3, 2), tp(1), pp(2, 2)),
        pair(
            "pp 3 (1, 2, 3 layers) -> pp 2 (4, 2)",
            attention(6, 2),
            EngineSpec { stages: vec![1, 2, 3], ..pp(3, 1) },
            EngineSpec { stages: vec![4, 2], ..pp(2, 1) },
        ),
        pair("mla, tp 16 -> 4", mla(1), tp(16), tp(4)),
        pair("mla, tp 1 -> 4", mla(2), tp(1), tp(4)),
        pair("gqa, tp 8 -> 2, 2 heads", attention(1, 2), tp(8), tp(2)),
        pair("gqa, tp 2 -> 8, 2 heads", attention(1, 2), tp(2), tp(8)),
        pair("block 16 -> 64", attention(2, 2), block(16), block(64)),
        pair("block 64 -> 16", attention(2, 2), block(64), block(16)),
        pair("block 24 -> 36", attention(2, 2), block(24), block(36)),
        pair("block 16 -> 64 head-major", attention(2, 2), block(16), layout(Layout::HeadMajor, 64)),
        pair(
            "head-major -> token-major",
            attention(2, 4),
            layout(Layout::HeadMajor, 16),
            layout(Layout::TokenMajor, 16),
        ),
        pair("token-major -> head-major, tp 2 -> 1", attention(2, 4), tp(2), layout(Layout::HeadMajor, 16)),
        pair("vLLM's CPU layout, block 32 -> 64", attention(2, 2), layout(TURNED, 32), layout(TURNED, 64)),
        pair(
            "vLLM's CPU layout, block 64 -> 32, tp 1 -> 2",
            attention(2, 2),
            layout(TURNED, 64),
            EngineSpec { tp: 2, ..layout(TURNED, 32) },
        ),
        pair(
            "vLLM's CPU layout -> packed",
            attention(1, 2),
            layout(TURNED, 16),
            EngineSpec { parts: Parts::Packed, ..tp(1) },
        ),
        pair(
            "an order of the engine's own, tp 2 -> 1",
            attention(2, 4),
            EngineSpec { tp: 2, ..layout(Layout::Whole, 16) },
            layout(Layout::Whole, 16),
        ),
        pair("full and window", hybrid(4, 2), tp(1), tp(1)),
        pair(
            "full and chunks of 32, tp 2 -> 1",
            partly(GroupKind::Chunked { chunk: 32 }, 4, 4),
            tp(2),
            EngineSpec { block_size: vec![32, 16], ..tp(1) },
        ),
        pair(
            "full (16 -> 64) and window, tp 2 -> 1",
            hybrid(4, 4),
            tp(2),
            EngineSpec { block_size: vec![64, 16], ..tp(1) },
        ),
        pair(
            "full and window in shared memory, pp 1 -> 2",
            hybrid(4, 2),
            EngineSpec { shared_groups: true, ..tp(1) },
            pp(2, 1),
        ),
        pair("states by channels, tp 2 -> 1", mamba(4, true), tp(2), tp(1)),
        pair("states by channels, tp 1 -> 4", mamba(4, true), tp(1), tp(4)),
        pair("whole states, tp 1 -> 2", mamba(4, false), tp(1), tp(2)),
        pair("dcp 2 -> none, mla", mla(2), dcp(2, 2, 1), tp(1)),
        pair("none -> dcp 2, interleave 4", attention(2, 2), tp(2), dcp(4, 2, 4)),
        pair("dcp 2 -> dcp 4, mla", mla(1), dcp(2, 2, 2), dcp(4, 4, 1)),
        pair(
            "layers in one block -> regions for K and V",
            attention(3, 2),
            EngineSpec { layers_in_block: true, ..tp(1) },
            EngineSpec { parts: Parts::Regions, ..tp(1) },
        ),
        pair(
            "physical blocks of 8 -> 32 whole, tp 2 -> 1",
            attention(2, 2),
            EngineSpec { tp: 2, pages: 4, block_size: vec![32], gap: 8, ..layout(Layout::HeadMajor, 32) },
            EngineSpec { lead: 24, ..block(32) },
        ),
        pair(
            "everything at once",
            hybrid(6, 4),
            EngineSpec {
                stages: vec![1, 5],
                block_size: vec![32, 32],
                layout: Layout::HeadMajor,
                parts: Parts::Packed,
                ..pp(2, 2)
            },
            EngineSpec { block_size: vec![24, 16], layers_in_block: true, gap: 40, ..pp(1, 3) },
        ),
    ]
}

fn spans(spec: &CacheSpec) -> Vec<(Group, u64)> {
    spec.groups().into_iter().map(|group| (group.clone(), group.span())).collect()
}

/// Block ids from `next` on for a prompt, per group from token 0: vLLM's rule for what is in front of a window, one
/// block for a state. `backwards` makes neighbours in the sequence no neighbours in memory.
fn allocate(spec: &CacheSpec, tokens: u64, next: &mut u32, backwards: bool) -> Lists {
    let mut lists = Lists::new();
    for (group, span) in spans(spec) {
        let entries = if group.kind == GroupKind::State { 1 } else { tokens.div_ceil(span) };
        let skipped = match group.kind {
            GroupKind::SlidingWindow { window } => (tokens + 1).saturating_sub(u64::from(window)) / span,
            GroupKind::Chunked { chunk } => tokens.saturating_sub(1) / u64::from(chunk) * u64::from(chunk) / span,
            _ => 0,
        };
        let mut ids: Vec<u32> = (*next..).take((entries - skipped) as usize).collect();
        *next += ids.len() as u32;
        if backwards {
            ids.reverse();
        }
        lists.push(std::iter::repeat_n(0, skipped as usize).chain(ids).collect());
    }
    lists
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// What arrives of the tokens `start..end`, by group: whole grains at the end, whole blocks of ours in a window.
fn arriving(p: &CacheSpec, d: &CacheSpec, start: u64, end: u64) -> Vec<(u64, u64)> {
    let both = spans(p).into_iter().zip(spans(d));
    both.map(|((_, theirs), (_, ours))| (start, end.next_multiple_of(gcd(theirs, ours)))).collect()
}

/// All ranks' reports of a request on one side, told to an aggregator in an order that `seed` decides; checks that the
/// request is over with the last of them and not before. Gives the failures.
fn aggregate(engine: &Engine, reports: &[WorkerReport], name: &str, sending: bool, seed: usize) -> usize {
    let ranks = engine.workers.iter().map(|worker| worker.rank);
    let mut aggregator = Aggregator::new(ranks).unwrap();
    let about = |report: &&WorkerReport| {
        let list = if sending { &report.finished_sending } else { &report.finished_recving };
        list.contains(&request(name))
    };
    let mut ordered: Vec<&WorkerReport> = reports.iter().filter(about).collect();
    assert_eq!(ordered.len(), engine.workers.len(), "every rank of {} reports {name} once", engine.name);
    let all = ordered.len();
    ordered.rotate_left(seed % all);
    if seed % 2 == 1 {
        ordered.reverse();
    }
    let mut failures = 0;
    for (index, report) in ordered.into_iter().enumerate() {
        aggregator.add(report).unwrap();
        let outcome = aggregator.poll().unwrap_or_default();
        let over = if sending { outcome.finished_sending } else { outcome.finished_recving };
        assert_eq!(over.contains(&request(name)), index + 1 == all, "{name} is over with the last rank's report");
        failures +=
            outcome.failed_recving.iter().filter(|f| f.request == request(name)).map(|f| f.causes.len()).sum::<usize>();
    }
    failures
}

fn run(index: usize, pair: &Pair, transport: Transport) {
    let spec = |engine: &EngineSpec, seed| CacheSpec { model: pair.model.clone(), engine: engine.clone(), seed };
    let (p_spec, d_spec) = (spec(&pair.p, 100 + index as u64), spec(&pair.d, 200 + index as u64));
    let mut p = Engine::start("prefill", &p_spec, transport);
    let mut d = Engine::start("decode", &d_spec, transport);
    let state = u64::from(pair.model.groups.iter().any(|group| group.kind == GroupKind::State));
    let (mut p_next, mut d_next) = (1, 1);
    let mut loads = Vec::new();
    // Prompts that end in a block and at its end, one token, and one whose first tokens D has already, the number being
    // none of the block sizes' multiples where the cache allows it.
    let whole = pair.p.layout == Layout::Whole;
    let prefix = if whole { 16 } else { 21 };
    for (number, (prompt, cached)) in [(75u64, 0u64), (2, 0), (97, prefix), (64 + state, 0)].into_iter().enumerate() {
        let refused_at = (number == 3).then(|| d.workers[index % d.workers.len()].rank);
        let (p_name, d_name) = (format!("p-{number}"), format!("d-{number}"));
        let held = prompt - state;
        let there = allocate(&p_spec, held, &mut p_next, number % 2 == 1);
        let mut here = allocate(&d_spec, held, &mut d_next, number % 3 == 2);
        let params = p.prefill(&p_name, &there, held);
        // What is cached needs no block.
        let mut lists = here.clone();
        for ((group, span), (list, here)) in spans(&d_spec).iter().zip(lists.iter_mut().zip(&mut here)) {
            let front = if group.kind == GroupKind::State { 0 } else { (cached / span) as usize };
            list.drain(..front.min(list.len()));
            here.iter_mut().take(front).for_each(|id| *id = 0);
        }
        d.load_part(&d_name, &params, &lists, (prompt, held - cached), |rank, load| {
            if Some(rank) == refused_at {
                load.refused = Some("this rank alone refuses".into());
            }
        });
        let said = d.await_received(&d_name);
        p.await_sent(&p_name);
        let failed: Vec<_> = said.failures.keys().copied().collect();
        assert_eq!(failed, refused_at.into_iter().collect::<Vec<_>>(), "{}: {said:#?}", pair.name);
        assert!(said.failures.values().all(|failure| failure.cause == Cause::InvalidRequest));
        let failures = aggregate(&d, &d.reports, &d_name, false, index + number);
        assert_eq!(failures, usize::from(refused_at.is_some()));
        aggregate(&p, &p.reports, &p_name, true, index + number);
        loads.push(Loaded { request: p_name, blocks: here, tokens: arriving(&p_spec, &d_spec, cached, held) });
    }
    let checked = |rank| Ask::Check { loads: loads[..if rank == d_rank(index, &d_spec) { 3 } else { 4 }].to_vec() };
    // All at the same time.
    d.workers.iter_mut().for_each(|worker| worker.send(&checked(worker.rank)));
    for worker in &mut d.workers {
        let told = worker.received();
        assert!(matches!(told, Tell::Count(1..)), "{told:?}");
    }
    for worker in d.workers.iter_mut().chain(&mut p.workers) {
        let stats = worker.ok(&Ask::Stats);
        assert!(matches!(stats, Tell::Stats { loads: 0, leases: 0, transfers: 0, .. }), "something is left: {stats:?}");
    }
    // Every lease ended because its readers said so.
    assert_eq!(p.stats.sends_expired, 0);
    assert_eq!(p.stats.sends_read + p.stats.sends_released, 4 * p.workers.len() as u64);
}

fn d_rank(index: usize, spec: &CacheSpec) -> kvferry::proto::ids::RankId {
    let ranks = crate::common::engine::ranks(spec);
    ranks[index % ranks.len()]
}

fn run_all(transport: Transport) {
    let only = std::env::var("KVFERRY_SHAPE").ok();
    let pairs = pairs();
    assert!(pairs.len() >= 24);
    for (index, pair) in pairs.iter().enumerate() {
        if only.as_ref().is_none_or(|only| pair.name.contains(only.as_str())) {
            println!("{} over {transport:?}", pair.name);
            run(index, pair, transport);
        }
    }
}

#[test]
fn every_pair_of_shapes_over_tcp() {
    run_all(Transport::Tcp);
}

#[test]
fn every_pair_of_shapes_over_shm() {
    run_all(Transport::Shm);
}
