//! What it costs to plan a request: `scripts/bench-planning` sets it beside the stock connector's planning.
//!
//! A consumer of TP 1 reads from a producer of TP 4: per request, one plan for each of the producer's four ranks. Every
//! line of the input is a round, answered by a line: nanoseconds for the plans and for all of their operations, the number
//! of operations, and the bytes of the plans.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

use std::hint::black_box;
use std::io::BufRead;
use std::time::Instant;

use kvferry::proto::EngineId;
use kvferry::proto::geometry::GroupKind;
use kvferry::proto::plan::{CopyPlan, Holding, RankPlan, Wanted, assign};
use kvferry::proto::shape::{EngineSpec, GroupSpec, Layout, ModelSpec, Parts, RankCache};
use kvferry::proto::wire::{Blocks, RankMetadata};

const LAYERS: u32 = 64;
const BLOCKS: u32 = 2000;
const BLOCK_SIZE: u32 = 16;
const REMOTE_TP: u32 = 4;

/// With an address and keys as long as UCX's.
fn metadata(spec: &EngineSpec, rank: &RankCache) -> RankMetadata {
    let mut found = rank.metadata(&EngineId::new("engine").unwrap(), spec.shape());
    found.agent.address = vec![1; 64];
    found.agent.regions.iter_mut().for_each(|region| region.rkey = vec![1; 64]);
    found
}

/// Two engines, and a request between them.
struct Setup {
    plans: Vec<RankPlan>,
    local: Vec<Blocks>,
    remote: Vec<Blocks>,
}

impl Setup {
    fn new() -> Setup {
        // 8 KV heads of 128 elements of 2 bytes; vLLM's layout: per head and token K, then V.
        let model = ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..LAYERS, 8, 256, 256)] };
        let spec = |tp| EngineSpec {
            tp,
            block_size: vec![BLOCK_SIZE],
            layout: Layout::HeadMajor,
            parts: Parts::Packed,
            num_blocks: 4 * BLOCKS,
            ..EngineSpec::default()
        };
        let (consumer, producer) = (spec(1), spec(REMOTE_TP));
        let (local, remote) = (consumer.ranks(&model).unwrap(), producer.ranks(&model).unwrap());
        let holdings = |ranks: &[RankCache]| ranks.iter().map(RankCache::holding).collect::<Vec<Holding>>();
        let (own, others) = (holdings(&local), holdings(&remote));
        let mine = metadata(&consumer, &local[0]);
        let theirs: Vec<RankMetadata> = remote.iter().map(|rank| metadata(&producer, rank)).collect();
        let shares = assign(mine.rank, &own, &others, 0).unwrap();
        let plan = |other: &RankMetadata| RankPlan::new(&mine, other, &shares[&other.rank].cells).unwrap();
        let plans = theirs.iter().map(plan).collect();
        let mut state = 7u64;
        let mut ids = || {
            let mut ids: Vec<u32> = (0..4 * BLOCKS).collect();
            for at in (1..ids.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ids.swap(at, (state >> 33) as usize % (at + 1));
            }
            ids.truncate(BLOCKS as usize);
            vec![Blocks::from(ids)]
        };
        Setup { plans, local: ids(), remote: ids() }
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

    /// Bytes of a request's plans that no other request shares.
    fn bytes(&self) -> usize {
        let ids = |plan: &CopyPlan| {
            let lists = plan.lists.iter().map(|pair| pair.local.len() + pair.remote.len());
            std::mem::size_of::<CopyPlan>() + 4 * lists.sum::<usize>()
        };
        self.request().iter().map(ids).sum()
    }
}

fn main() {
    let setup = Setup::new();
    for line in std::io::stdin().lock().lines() {
        line.unwrap();
        let (planned, expanded, operations) = setup.round();
        println!("{planned} {expanded} {operations} {}", setup.bytes());
    }
}
