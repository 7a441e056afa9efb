//! What it costs to plan a request: `cargo bench --bench planning`.
//!
//! A consumer of TP 1 reads from a producer of TP 4: per request, one plan for each of the producer's four ranks. Prints
//! the time per request and how it grows with blocks and layers, the bytes that a plan holds per block, and what is done
//! once per pair of engines. `scripts/bench-planning` sets it beside the stock connector's planning; for that, with
//! the argument `rounds`, every line of the input is one round, answered by a line of nanoseconds.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::hint::black_box;
use std::io::BufRead;
use std::sync::Arc;
use std::time::Instant;

use kvferry::proto::geometry::GroupKind;
use kvferry::proto::handshake::Session;
use kvferry::proto::plan::{CopyPlan, Holding, LocalRank, RankPlan, Segment, Wanted, assign};
use kvferry::proto::shape::{EngineSpec, GroupSpec, Layout, ModelSpec, Parts, RankCache};
use kvferry::proto::wire::{Blocks, HandshakeReply, Message, RankBlob, RankMetadata};
use kvferry::proto::{EngineId, Incarnation};

const LAYERS: u32 = 64;
const BLOCKS: u32 = 2000;
const BLOCK_SIZE: u32 = 16;
const REMOTE_TP: u32 = 4;
const ROUNDS: usize = 31;

/// With an address and keys as long as UCX's.
fn metadata(spec: &EngineSpec, rank: &RankCache) -> RankMetadata {
    let mut found = rank.metadata(&EngineId::new("engine").unwrap(), spec.shape());
    found.agent.address = vec![1; 64];
    found.agent.regions.iter_mut().for_each(|region| region.rkey = vec![1; 64]);
    found
}

/// How block ids follow each other.
#[derive(Debug, Clone, Copy)]
enum Order {
    /// One after the other on both sides.
    Consecutive,
    /// At random on both sides.
    Scattered,
}

/// Two engines, and a request between them.
struct Setup {
    plans: Vec<RankPlan>,
    local: Vec<Blocks>,
    remote: Vec<Blocks>,
    /// Nanoseconds for what is done once per pair of engines.
    once: u64,
}

impl Setup {
    fn new(layers: u32, blocks: u32, order: Order) -> Setup {
        // 8 KV heads of 128 elements of 2 bytes; vLLM's layout: per head and token K, then V.
        let model = ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..layers, 8, 256, 256)] };
        let spec = |tp| EngineSpec {
            tp,
            block_size: vec![BLOCK_SIZE],
            layout: Layout::HeadMajor,
            parts: Parts::Packed,
            num_blocks: 4 * blocks,
            ..EngineSpec::default()
        };
        let (consumer, producer) = (spec(1), spec(REMOTE_TP));
        let (local, remote) = (consumer.ranks(&model).unwrap(), producer.ranks(&model).unwrap());
        let holdings = |ranks: &[RankCache]| ranks.iter().map(RankCache::holding).collect::<Vec<Holding>>();
        let (own, others) = (holdings(&local), holdings(&remote));
        let mine = metadata(&consumer, &local[0]);
        let theirs: Vec<RankMetadata> = remote.iter().map(|rank| metadata(&producer, rank)).collect();
        let start = Instant::now();
        let shares = assign(mine.rank, &own, &others, 0).unwrap();
        let plan = |other: &RankMetadata| RankPlan::new(&mine, other, &shares[&other.rank].cells).unwrap();
        let plans = theirs.iter().map(plan).collect();
        let once = start.elapsed().as_nanos() as u64;
        let mut state = 7u64;
        let mut ids = || {
            let mut ids: Vec<u32> = (0..4 * blocks).collect();
            if matches!(order, Order::Scattered) {
                for at in (1..ids.len()).rev() {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    ids.swap(at, (state >> 33) as usize % (at + 1));
                }
            }
            ids.truncate(blocks as usize);
            vec![Blocks::from(ids)]
        };
        Setup { plans, local: ids(), remote: ids(), once }
    }

    fn request(&self) -> Vec<CopyPlan> {
        let tokens = self.local[0].len() as u64 * u64::from(BLOCK_SIZE);
        let wanted = Wanted {
            local: &self.local,
            remote: &self.remote,
            tokens: (0, tokens),
            remote_tokens: tokens,
            null_block: Some(u32::MAX),
            window_only: false,
        };
        self.plans.iter().map(|plan| plan.request(&wanted).unwrap()).collect()
    }

    /// Nanoseconds of planning a request, nanoseconds of making all of its operations, and their number.
    fn round(&self) -> (u64, u64, u64) {
        let start = Instant::now();
        let plans = black_box(self.request());
        let planned = start.elapsed().as_nanos() as u64;
        let start = Instant::now();
        let operations = plans.into_iter().flat_map(|plan| plan.expand(u64::MAX)).map(black_box).count();
        (planned, start.elapsed().as_nanos() as u64, operations as u64)
    }

    /// Bytes of a request's plans: what each request has of its own, and what all requests share.
    fn bytes(&self) -> (usize, usize) {
        let plans = self.request();
        let ids = |plan: &CopyPlan| {
            let lists = plan.lists.iter().map(|pair| pair.local.len() + pair.remote.len());
            std::mem::size_of::<CopyPlan>() + 4 * lists.sum::<usize>()
        };
        let segments = |plan: &CopyPlan| plan.segments.len() * std::mem::size_of::<Segment>();
        (plans.iter().map(ids).sum(), plans.iter().map(segments).sum())
    }
}

/// What a consumer of one rank does when it meets an engine of many ranks: milliseconds to decode and judge the listener's
/// answer, and to plan the copies from each rank.
fn first_contact(layers: u32, ranks: u32) -> (f64, f64) {
    let model = ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..layers, ranks, 64, 64)] };
    let spec = |tp| EngineSpec { tp, block_size: vec![BLOCK_SIZE], num_blocks: BLOCKS, ..EngineSpec::default() };
    let (consumer, producer) = (spec(1), spec(ranks));
    let mine = Arc::new(metadata(&consumer, &consumer.ranks(&model).unwrap()[0]));
    let theirs = producer.ranks(&model).unwrap();
    let blob =
        |rank: &RankCache| RankBlob { rank: rank.rank, metadata: metadata(&producer, rank).to_bytes().unwrap().into() };
    let reply = HandshakeReply::Ranks {
        id: 1,
        engine: mine.engine.clone(),
        incarnation: Incarnation(1),
        shape: producer.shape(),
        ranks: theirs.iter().map(blob).collect(),
    };
    let reply = reply.to_bytes().unwrap();
    let session = Session::new(Arc::clone(&mine), 1, mine.engine.clone(), None);
    let own = [Holding::new(mine.rank, &mine.geometry)];
    let round = || {
        let start = Instant::now();
        let outcome = session.judge(HandshakeReply::from_bytes(&reply).unwrap()).unwrap();
        let judged = start.elapsed();
        let others: Vec<Holding> = outcome.ranks.iter().map(|rank| Holding::new(rank.rank, &rank.geometry)).collect();
        let shares = assign(mine.rank, &own, &others, 0).unwrap();
        let this = LocalRank::new(&mine).unwrap();
        for rank in &outcome.ranks {
            black_box(this.plan(rank, &shares[&rank.rank].cells).unwrap());
        }
        (judged.as_secs_f64() * 1e3, (start.elapsed() - judged).as_secs_f64() * 1e3)
    };
    let rounds: Vec<_> = (0..ROUNDS).map(|_| round()).collect();
    let median = |of: fn(&(f64, f64)) -> f64| {
        let mut all: Vec<f64> = rounds.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    (median(|round| round.0), median(|round| round.1))
}

fn rounds() {
    let setup = Setup::new(LAYERS, BLOCKS, Order::Scattered);
    for line in std::io::stdin().lock().lines() {
        line.unwrap();
        let (planned, expanded, operations) = setup.round();
        println!("{planned} {expanded} {operations}");
    }
}

fn main() {
    if std::env::args().any(|arg| arg == "rounds") {
        return rounds();
    }
    println!("TP {REMOTE_TP} to TP 1, medians of {ROUNDS} rounds; a request is {REMOTE_TP} plans\n");
    println!("layers  blocks  order          plan a request   per block     its operations    number     once");
    for order in [Order::Scattered, Order::Consecutive] {
        let sizes = [(64, 2000), (64, 4000), (64, 8000), (128, 2000)];
        let setups = sizes.map(|(layers, blocks)| Setup::new(layers, blocks, order));
        // In turns, so that what else the machine does falls on all of them.
        let rounds: Vec<_> = (0..ROUNDS).map(|_| setups.each_ref().map(Setup::round)).collect();
        for (index, ((layers, blocks), setup)) in sizes.into_iter().zip(&setups).enumerate() {
            let median = |of: fn(&(u64, u64, u64)) -> u64| {
                let mut all: Vec<u64> = rounds.iter().map(|round| of(&round[index])).collect();
                all.sort_unstable();
                all[all.len() / 2] as f64 / 1e3
            };
            let planned = median(|round| round.0);
            println!(
                "{layers:>6}  {blocks:>6}  {:<12}  {planned:>11.1} us  {:>6.1} ns  {:>15.1} us  {:>9}  {:>5.2} ms",
                format!("{order:?}").to_lowercase(),
                planned * 1e3 / f64::from(blocks),
                median(|round| round.1),
                rounds[0][index].2,
                setup.once as f64 / 1e6
            );
        }
    }
    let setup = Setup::new(LAYERS, BLOCKS, Order::Scattered);
    let (own, shared) = setup.bytes();
    println!(
        "\n{LAYERS} layers, {BLOCKS} blocks: {:.1} bytes of plans per block and request, {shared} bytes once for all requests",
        own as f64 / f64::from(BLOCKS)
    );
    for ranks in [1, 64] {
        let (judged, planned) = first_contact(LAYERS, ranks);
        println!(
            "first contact with an engine of {ranks} ranks: {judged:.2} ms to judge its answer, {planned:.2} ms to plan"
        );
    }
}
