//! Any shape to any shape: random pairs of engines, and every byte of every rank against an oracle.
//!
//! `KVFERRY_SHAPES_SEED` (a number) repeats a run, `KVFERRY_SHAPES_CASES` sets how many pairs it tries. A case that fails
//! prints a seed of its own: it belongs into `regressions.txt`, whose cases every run tries first.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod case;
mod choices;
mod oracle;
mod refusals;
mod rules;

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use case::{Case, span};
use choices::{Choices, mix, simplify};
use kvferry_proto::ErrorKind;
use kvferry_proto::geometry::{Group, GroupKind};
use kvferry_proto::plan::{Cell, CopyPlan, Holding, LoadPart, RankPlan, Share, Wanted, assign};
use kvferry_proto::shape::{EngineSpec, Layout, ModelSpec, RankCache};
use kvferry_proto::wire::{Blocks, RankMetadata};
use kvferry_proto::{EngineId, RankId};
use oracle::{Identity, Travel, places, travel};

const CASES: u64 = 20_500;

/// An engine's ranks, and what they hold.
struct Engine {
    ranks: Vec<RankCache>,
    metadata: BTreeMap<RankId, RankMetadata>,
    holdings: Vec<Holding>,
}

impl Engine {
    fn new(spec: &EngineSpec, model: &ModelSpec) -> Engine {
        let ranks = spec.ranks(model).unwrap_or_else(|e| panic!("{e}: {spec:?} {model:?}"));
        let id = EngineId::new("engine").unwrap();
        let metadata = ranks.iter().map(|rank| (rank.rank, rank.metadata(&id, spec.shape()))).collect();
        let holdings = ranks.iter().map(RankCache::holding).collect();
        Engine { ranks, metadata, holdings }
    }
}

/// Memory whose bytes are told from each other, one number a byte.
type Memory = Vec<Vec<Identity>>;

/// Bytes that are nothing: even numbers, which no identity is.
fn blank(lens: &[u64], side: u64) -> Memory {
    let tag = |region: usize, at: u64| (side << 62 | (region as u64) << 40 | at) << 1;
    lens.iter().enumerate().map(|(region, &len)| (0..len).map(|at| tag(region, at)).collect()).collect()
}

fn ensure(holds: bool, text: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(text()) }
}

/// Executes a plan; gives the number of operations.
fn execute(
    plan: &CopyPlan,
    max: u64,
    to: &mut Memory,
    from: &Memory,
    mut wrote: impl FnMut(usize, usize) -> Result<(), String>,
) -> Result<u64, String> {
    let (mut operations, mut bytes) = (0, 0);
    for op in plan.clone().expand(max) {
        ensure(op.len > 0 && op.len <= max, || format!("{op:?} is empty or over {max} bytes"))?;
        let (l, r) = (op.local_offset as usize, op.remote_offset as usize);
        let len = op.len as usize;
        let source = from.get(op.remote_region as usize).and_then(|region| region.get(r..r + len));
        let target = to.get_mut(op.local_region as usize).and_then(|region| region.get_mut(l..l + len));
        let (Some(source), Some(target)) = (source, target) else { return Err(format!("{op:?} is outside a region")) };
        target.copy_from_slice(source);
        for at in l..l + len {
            wrote(op.local_region as usize, at)?;
        }
        operations += 1;
        bytes += op.len;
    }
    ensure(bytes == plan.bytes(), || format!("{bytes} bytes copied, the plan said {}", plan.bytes()))?;
    Ok(operations)
}

/// The request chunk by chunk, as from a prefill under way: each from what the other side has written by then. Nothing is
/// written twice.
fn in_chunks(
    plan: &RankPlan,
    wanted: &Wanted<'_>,
    theirs: &RankMetadata,
    case: &Case,
    memory: &mut Memory,
    source: &Memory,
) -> Result<u64, String> {
    let (start, end) = wanted.tokens;
    let step = plan.chunk_multiple().unwrap_or(u64::MAX);
    let chosen = |at: &u64| mix(&mut (case.spread ^ *at)).is_multiple_of(2);
    let cuts = (start / step + 1..=end / step).map(|n| n * step).filter(|at| *at < end).filter(chosen);
    // All of it may be written before the prefill is known to be over.
    let cuts: Vec<u64> = cuts.chain((case.spread.is_multiple_of(2) && step != u64::MAX).then_some(end)).collect();
    let mut written: Vec<Vec<u8>> = memory.iter().map(|region| vec![0; region.len()]).collect();
    let mut once = |region: usize, at: usize| {
        written[region][at] += 1;
        ensure(written[region][at] == 1, || format!("byte {at} of region {region} is written by two chunks"))
    };
    let mut from = start;
    for to in cuts.iter().copied().filter(|to| *to > start) {
        let more = mix(&mut (case.spread ^ to ^ 1)) % (wanted.remote_tokens - to + 1);
        let so_far = |(list, group): (&Blocks, &Group)| match group.kind {
            GroupKind::Full | GroupKind::Latent => {
                Blocks::from(&list.ids()[..(to + more).div_ceil(group.span()) as usize])
            }
            _ => Blocks::default(),
        };
        let remote: Vec<Blocks> = wanted.remote.iter().zip(&theirs.geometry.groups).map(so_far).collect();
        let partial = Wanted { remote: &remote, remote_tokens: to + more, ..*wanted };
        let copy = plan.part(&partial, LoadPart::Chunk(from, to)).map_err(|e| format!("chunk {from} to {to}: {e}"))?;
        execute(&copy, u64::MAX, memory, source, &mut once)?;
        from = to;
    }
    let rest = plan.part(wanted, LoadPart::Rest(from)).map_err(|e| format!("the rest from {from} on: {e}"))?;
    execute(&rest, u64::MAX, memory, source, &mut once)?;
    Ok(cuts.len() as u64)
}

fn shares_of(
    engine: &Engine,
    other: &Engine,
    spread: u64,
) -> Result<BTreeMap<RankId, BTreeMap<RankId, Share>>, String> {
    let share = |rank: &RankCache| {
        let shares = assign(rank.rank, &engine.holdings, &other.holdings, spread);
        Ok((rank.rank, shares.map_err(|e| format!("assign: {e}"))?))
    };
    engine.ranks.iter().map(share).collect()
}

/// Every producer rank hears from as many consumer ranks as it is told to expect, and from one at least.
fn check_readers(shares: &BTreeMap<RankId, BTreeMap<RankId, Share>>, producers: &Engine) -> Result<(), String> {
    for producer in &producers.ranks {
        let having: Vec<u32> = shares.values().filter_map(|all| all.get(&producer.rank)).map(|s| s.readers).collect();
        ensure(!having.is_empty(), || format!("nobody tells rank {}", producer.rank))?;
        ensure(having.iter().all(|&readers| readers as usize == having.len()), || {
            format!("rank {} hears from {} ranks, which say {having:?}", producer.rank, having.len())
        })?;
    }
    let known = |all: &BTreeMap<RankId, Share>| all.keys().all(|rank| producers.metadata.contains_key(rank));
    ensure(shares.values().all(known), || "a share of a rank that there is not".into())
}

/// Whether the request must be refused by a plan with these cells.
fn refused(case: &Case, travels: &[Travel], cells: &[Cell]) -> bool {
    let groups = case.model.groups.iter().zip(travels).filter(|(_, travel)| **travel == Travel::Refused);
    groups
        .map(|(group, _)| group)
        .any(|group| group.layers.iter().any(|&layer| cells.iter().any(|cell| cell.layer == group.layer_name(layer))))
}

/// What a run has seen, so that it can be seen to have seen it.
#[derive(Debug, Default)]
struct Seen {
    plans: AtomicU64,
    bytes: AtomicU64,
    operations: AtomicU64,
    copied: AtomicU64,
    refused: AtomicU64,
    untouched: AtomicU64,
    neither_divides: AtomicU64,
    block_sizes: AtomicU64,
    stages: AtomicU64,
    dealt: AtomicU64,
    turned: AtomicU64,
    whole: AtomicU64,
    unread_ranks: AtomicU64,
    chunks: AtomicU64,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

fn note(case: &Case, seen: &Seen) {
    let (p, d) = (&case.producer, &case.consumer);
    let count = |counter: &AtomicU64, holds: bool| add(counter, holds.into());
    count(&seen.neither_divides, !p.tp.is_multiple_of(d.tp) && !d.tp.is_multiple_of(p.tp));
    let differ = |group| {
        let (a, b) = (span(p, group), span(d, group));
        !a.is_multiple_of(b) && !b.is_multiple_of(a)
    };
    count(&seen.block_sizes, (0..case.model.groups.len()).any(differ));
    count(&seen.stages, p.pp != d.pp && p.pp.min(d.pp) > 1);
    count(&seen.dealt, p.dcp > 1 && d.dcp > 1 && (p.dcp, p.dcp_interleave) != (d.dcp, d.dcp_interleave));
    let turned = |spec: &EngineSpec| matches!(spec.layout, Layout::Turned { .. });
    count(&seen.turned, turned(p) != turned(d));
    count(&seen.whole, p.layout == Layout::Whole);
}

/// One case: all ranks of the consumer read what they hold.
fn check(case: &Case, seen: &Seen) -> Result<(), String> {
    let (producers, consumers) = (Engine::new(&case.producer, &case.model), Engine::new(&case.consumer, &case.model));
    let shares = shares_of(&consumers, &producers, case.spread)?;
    check_readers(&shares, &producers)?;
    let travels: Vec<Travel> = (0..case.model.groups.len()).map(|group| travel(case, group)).collect();
    let sources: HashMap<RankId, Memory> = producers
        .ranks
        .iter()
        .map(|rank| {
            let mut memory = blank(&rank.region_lens, 0);
            places(&case.model, rank, &case.remote, |place| memory[place.region][place.offset] = place.identity);
            (rank.rank, memory)
        })
        .collect();
    let (local, remote) = (Case::blocks(&case.local), Case::blocks(&case.remote));
    let wanted = Wanted {
        local: &local,
        remote: &remote,
        tokens: case.tokens,
        remote_tokens: case.remote_tokens,
        null_block: case.null_block,
        window_only: case.window_only,
    };
    let mut any_refused = false;
    for rank in &consumers.ranks {
        // How often each byte is written, and how often it has to be.
        let mut written: Vec<Vec<u8>> = rank.region_lens.iter().map(|&len| vec![0; len as usize]).collect();
        let mut found = blank(&rank.region_lens, 1);
        let (mut cut, mut chunks) = (found.clone(), found.clone());
        let mut whole = true;
        for (producer, share) in &shares[&rank.rank] {
            let (mine, theirs) = (&consumers.metadata[&rank.rank], &producers.metadata[producer]);
            let plan = RankPlan::new(mine, theirs, &share.cells).map_err(|e| format!("plan: {e}"))?;
            let copy = plan.request(&wanted);
            if refused(case, &travels, &share.cells) {
                let error = copy.err().ok_or("a request for tokens that the producer lacks was not refused")?;
                ensure(error.kind() == ErrorKind::InvalidArgument, || format!("{error}"))?;
                (whole, any_refused) = (false, true);
                continue;
            }
            let copy = copy.map_err(|e| format!("request: {e}"))?;
            let len = |rank: &RankMetadata, region: u32| rank.agent.regions.get(region as usize).map(|r| r.len);
            copy.check(|region| len(mine, region), |region| len(theirs, region)).map_err(|e| format!("check: {e}"))?;
            ensure(!share.cells.is_empty() || copy.is_empty(), || "an empty share moves bytes".into())?;
            let source = &sources[producer];
            let merged = execute(&copy, u64::MAX, &mut found, source, |region, at| {
                written[region][at] += 1;
                ensure(written[region][at] == 1, || format!("byte {at} of region {region} is written twice"))
            })?;
            let apart = execute(&copy, case.max_op_bytes, &mut cut, source, |_, _| Ok(()))?;
            ensure(merged <= apart, || format!("{merged} operations of any size, {apart} of bounded size"))?;
            add(&seen.chunks, in_chunks(&plan, &wanted, theirs, case, &mut chunks, source)?);
            add(&seen.plans, 1);
            add(&seen.operations, merged);
            add(&seen.bytes, copy.bytes());
            add(&seen.unread_ranks, share.cells.is_empty().into());
        }
        ensure(found == cut, || "bounded operations copy something else".into())?;
        ensure(found == chunks, || "chunks copy something else".into())?;
        if !whole {
            continue;
        }
        let mut expected = blank(&rank.region_lens, 1);
        places(&case.model, rank, &case.local, |place| {
            let copied = match &travels[place.group] {
                // Without a block on the other side there is no state to copy.
                Travel::State => !case.remote[place.group].blocks.is_empty(),
                Travel::Tokens(tokens) => tokens.contains(&place.token),
                Travel::Refused => false,
            };
            if copied {
                expected[place.region][place.offset] = place.identity;
            } else {
                add(&seen.untouched, 1);
            }
        });
        for (region, (found, expected)) in found.iter().zip(&expected).enumerate() {
            if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
                return Err(format!(
                    "rank {}, byte {at} of region {region}: {:#x} instead of {:#x}",
                    rank.rank, found[at], expected[at]
                ));
            }
        }
        add(&seen.copied, 1);
    }
    add(&seen.refused, any_refused.into());
    Ok(())
}

/// The case's complaint; a panic is one too.
fn complaint(choices: &mut Choices, seen: &Seen) -> Option<(String, Option<Case>)> {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        let case = Case::new(choices);
        note(&case, seen);
        let result = check(&case, seen);
        (case, result)
    }));
    match outcome {
        Ok((_, Ok(()))) => None,
        Ok((case, Err(text))) => Some((text, Some(case))),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Some((format!("panic: {}", text.unwrap_or_default()), None))
        }
    }
}

fn report(seed: u64) -> ! {
    let seen = Seen::default();
    let mut choices = simplify(seed, |choices| complaint(choices, &seen).is_some());
    let (text, case) = complaint(&mut choices, &seen).expect("a case that failed fails again");
    panic!("{text}\nin {case:#?}\nThe case's seed is {seed}: add it to proto/tests/proto_shapes/regressions.txt");
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, not a number")))
}

#[test]
fn cases_that_failed_before() {
    let lines = include_str!("regressions.txt").lines().map(|line| line.split('#').next().unwrap().trim());
    for line in lines.filter(|line| !line.is_empty()) {
        let seed = line.parse().unwrap_or_else(|_| panic!("regressions.txt: {line:?} is not a seed"));
        if complaint(&mut Choices::random(seed), &Seen::default()).is_some() {
            report(seed);
        }
    }
}

#[test]
fn any_shape_reads_from_any_other_every_byte_once() {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    let base = variable("KVFERRY_SHAPES_SEED").unwrap_or_else(now);
    let cases = variable("KVFERRY_SHAPES_CASES").unwrap_or(CASES);
    println!("{cases} cases, KVFERRY_SHAPES_SEED={base}");
    let seen = Seen::default();
    let (next, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while failed.load(Ordering::Relaxed) == 0 {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    if index >= cases {
                        return;
                    }
                    let seed = mix(&mut base.wrapping_add(index.wrapping_mul(0x2545_f491_4f6c_dd1d))).max(1);
                    if complaint(&mut Choices::random(seed), &seen).is_some() {
                        failed.store(seed, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    if failed.load(Ordering::Relaxed) != 0 {
        println!("KVFERRY_SHAPES_SEED={base} failed");
        report(failed.load(Ordering::Relaxed));
    }
    println!("{seen:?}");
    // The cases are of all kinds: a generator that only makes easy ones fails.
    let share = |counter: &AtomicU64| counter.load(Ordering::Relaxed) * 1000 / cases.max(1);
    if cases >= 1000 {
        for (what, counter, per_mille) in [
            ("plans", &seen.plans, 3000),
            ("bytes", &seen.bytes, 100_000),
            ("ranks compared", &seen.copied, 1500),
            ("refused requests", &seen.refused, 5),
            ("bytes left alone", &seen.untouched, 1000),
            ("TP sizes of which neither divides the other", &seen.neither_divides, 80),
            ("block sizes of which neither divides the other", &seen.block_sizes, 200),
            ("two different numbers of stages", &seen.stages, 20),
            ("tokens dealt in two ways", &seen.dealt, 20),
            ("K turned on one side only", &seen.turned, 200),
            ("blocks that move whole", &seen.whole, 40),
            ("ranks that nobody reads from", &seen.unread_ranks, 20),
            ("chunks", &seen.chunks, 1000),
        ] {
            assert!(share(counter) >= per_mille, "too few {what}: {counter:?} in {cases} cases");
        }
    }
}
