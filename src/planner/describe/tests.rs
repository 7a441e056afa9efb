#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::*;
use crate::proto::shape::{GroupSpec, Layout, PartSpec, Parts};

/// 4 layers of 4 heads, 8 bytes of K and V each per token and head: 64 bytes per token and layer.
fn llama() -> ModelSpec {
    ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..4, 4, 8, 8)] }
}

fn engine(tp: u32, pp: u32, block: u32, layout: Layout) -> EngineSpec {
    EngineSpec { tp, pp, block_size: vec![block], layout, parts: Parts::Packed, ..EngineSpec::default() }
}

fn deployment(producer: EngineSpec, consumer: EngineSpec) -> Deployment {
    Deployment {
        model: llama(),
        producer,
        consumer,
        tokens: 64,
        cached_tokens: 0,
        reuses_blocks: true,
        consecutive_blocks: false,
        max_operation_bytes: 4 << 20,
    }
}

#[test]
fn two_ranks_to_one_with_larger_blocks() {
    let d = deployment(engine(2, 1, 16, Layout::HeadMajor), engine(1, 1, 32, Layout::HeadMajor)).describe().unwrap();
    assert_eq!(d.links.len(), 2);
    // Per link: 4 layers, 2 heads, 64 tokens, 16 bytes. A run is a head's 16 tokens.
    let link = &d.links[1];
    assert_eq!((link.consumer, link.producer), (RankId { pp: 0, tp: 0 }, RankId { pp: 0, tp: 1 }));
    assert_eq!((&*link.layers, &*link.heads), (&[(0, 3)][..], &[(2, 3)][..]));
    assert_eq!(link.parts, ["k", "v"]);
    assert_eq!((link.bytes, link.operations), (4 * 2 * 64 * 16, 4 * 2 * 4));
    assert_eq!((link.run_min, link.run_median, link.run_max), (256, 256, 256));
    assert_eq!(d.consumers.len(), 1);
    assert_eq!((d.consumers[0].bytes, d.consumers[0].operations, d.consumers[0].peers), (4 * 4 * 64 * 16, 64, 2));
    let readers: Vec<_> = d.producers.iter().map(|p| (p.rank.tp, p.peers, p.bytes, p.heads.clone())).collect();
    assert_eq!(readers, [(0, 1, 8192, vec![(0, 1)]), (1, 1, 8192, vec![(2, 3)])]);
}

#[test]
fn neighbouring_blocks_merge_when_they_are_neighbours() {
    let same = || engine(1, 1, 16, Layout::HeadMajor);
    let apart = deployment(same(), same());
    let link = apart.describe().unwrap().links.remove(0);
    assert_eq!((link.operations, link.run_min, link.run_max), (4 * 4, 1024, 1024));
    let together = Deployment { consecutive_blocks: true, ..apart };
    let link = together.describe().unwrap().links.remove(0);
    assert_eq!((link.operations, link.run_min, link.run_max, link.segments), (4, 4096, 4096, 4));
    let cut = Deployment { max_operation_bytes: 3000, ..together };
    let link = cut.describe().unwrap().links.remove(0);
    assert_eq!((link.operations, link.run_min, link.run_median, link.run_max), (8, 1096, 1096, 3000));
    let cut = Deployment { max_operation_bytes: 1000, ..cut };
    let link = cut.describe().unwrap().links.remove(0);
    assert_eq!((link.operations, link.run_min, link.run_median, link.run_max), (20, 96, 1000, 1000));
}

#[test]
fn replicas_share_the_work_and_a_rank_that_nobody_reads_is_told() {
    let model = ModelSpec { groups: vec![GroupSpec::latent(0..2, 32)] };
    let d = |tp, dtp| {
        let (producer, consumer) = (engine(tp, 1, 16, Layout::TokenMajor), engine(dtp, 1, 16, Layout::TokenMajor));
        Deployment { model: model.clone(), ..deployment(producer, consumer) }.describe().unwrap()
    };
    let spread: Vec<_> = d(2, 2).links.iter().map(|l| (l.consumer.tp, l.producer.tp, l.bytes)).collect();
    assert_eq!(spread, [(0, 0, 4096), (1, 1, 4096)]);
    let idle = d(2, 1);
    let told: Vec<_> = idle.links.iter().map(|l| (l.producer.tp, l.bytes, l.layers.len(), l.run_median)).collect();
    assert_eq!(told, [(0, 4096, 1, 2048 / 4), (1, 0, 0, 0)]);
    assert_eq!(idle.producers.iter().map(|p| p.peers).collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn windows_and_states_hand_over_their_last_blocks() {
    let state = PartSpec { name: "ssm".into(), heads: 4, positions: 1, bytes: 100 };
    let model = ModelSpec {
        groups: vec![
            GroupSpec::attention(GroupKind::Full, [0], 4, 8, 8),
            GroupSpec::attention(GroupKind::SlidingWindow { window: 20 }, [1, 2], 4, 8, 8),
            GroupSpec::state([3], vec![state]),
        ],
    };
    // An engine has as many blocks as the request needs, whatever is said of their number, and groups share none.
    let same = || EngineSpec { num_blocks: 0, ..engine(1, 1, 16, Layout::HeadMajor) };
    let d = Deployment { model: model.clone(), ..deployment(same(), same()) };
    let side = d.engine("prefill", &d.producer).unwrap();
    let ids: Vec<u32> = side.blocks.iter().flat_map(|blocks| blocks.ids().to_vec()).collect();
    assert_eq!(ids.len(), 4 + 2 + 1);
    assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
    let d = d.describe().unwrap();
    // Tokens 45 to 63 of the window lie in blocks 2 and 3 of 4.
    assert_eq!(d.links[0].bytes, 64 * 64 + 2 * 2 * 16 * 64 + 400);
    let larger = engine(1, 1, 64, Layout::HeadMajor);
    let cut = Deployment { model, ..deployment(same(), larger) };
    let error = cut.describe().unwrap_err();
    assert!(error.message().contains("the producer has no block"), "{error}");
    let d = Deployment { reuses_blocks: false, ..cut }.describe().unwrap();
    assert_eq!(d.links[0].bytes, 64 * 64 + 2 * 2 * 16 * 64 + 400);
}

#[test]
fn a_cached_prefix_is_not_read() {
    let (p, c) = (engine(1, 2, 16, Layout::HeadMajor), engine(2, 1, 32, Layout::TokenMajor));
    let d = Deployment { cached_tokens: 32, ..deployment(p, c) }.describe().unwrap();
    let links: Vec<_> = d
        .links
        .iter()
        .map(|l| (l.consumer.tp, l.producer.pp, l.layers.clone(), l.heads.clone(), l.bytes, l.run_max))
        .collect();
    // Head-major and token-major have the content of one token and head in common.
    assert_eq!(
        links,
        [
            (0, 0, vec![(0, 1)], vec![(0, 1)], 2 * 2 * 32 * 16, 16),
            (0, 1, vec![(2, 3)], vec![(0, 1)], 2 * 2 * 32 * 16, 16),
            (1, 0, vec![(0, 1)], vec![(2, 3)], 2 * 2 * 32 * 16, 16),
            (1, 1, vec![(2, 3)], vec![(2, 3)], 2 * 2 * 32 * 16, 16),
        ]
    );
}

#[test]
fn lengths_are_those_of_the_operations() {
    let layouts = [Layout::HeadMajor, Layout::TokenMajor, Layout::Turned { element: 2 }];
    for (seed, (&l, &r)) in layouts.iter().flat_map(|l| layouts.iter().map(move |r| (l, r))).enumerate() {
        for (blocks, cached) in [((16, 16), 0), ((16, 32), 16), ((24, 16), 5), ((32, 16), 32)] {
            for consecutive_blocks in [false, true] {
                let tp = 1 + seed as u32 % 3;
                let d = Deployment {
                    consecutive_blocks,
                    cached_tokens: cached,
                    max_operation_bytes: 700,
                    ..deployment(engine(2, 1, blocks.0, l), engine(tp, 1, blocks.1, r))
                };
                check_lengths(&d);
            }
        }
    }
}

fn check_lengths(d: &Deployment) {
    let (local, remote) = (d.engine("decode", &d.consumer).unwrap(), d.engine("prefill", &d.producer).unwrap());
    let holdings = |side: &EngineSide| side.ranks.iter().map(RankCache::holding).collect::<Vec<_>>();
    for here in &local.metadata {
        for (rank, share) in assign(here.rank, &holdings(&local), &holdings(&remote), 0).unwrap() {
            let there = remote.metadata.iter().find(|m| m.rank == rank).unwrap();
            let wanted = Wanted {
                local: &local.blocks,
                remote: &remote.blocks,
                tokens: (d.cached_tokens, d.tokens),
                remote_tokens: d.tokens,
                null_block: Some(0),
                window_only: false,
            };
            let plan = RankPlan::new(here, there, &share.cells).unwrap().request(&wanted).unwrap();
            let mut expected = Lengths::new();
            for operation in plan.clone().expand(d.max_operation_bytes) {
                *expected.entry(operation.len).or_default() += 1;
            }
            assert_eq!(lengths(&plan, d.max_operation_bytes), expected, "{d:?}");
            assert_eq!(expected.iter().map(|(len, count)| len * count).sum::<u64>(), plan.bytes());
        }
    }
}

#[test]
fn what_cannot_be_described_is_refused_by_name() {
    let good = || deployment(engine(1, 1, 16, Layout::HeadMajor), engine(1, 1, 16, Layout::HeadMajor));
    let refused = |change: &dyn Fn(&mut Deployment), kind: ErrorKind, part: &str| {
        let mut d = good();
        change(&mut d);
        let error = d.describe().unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.message().contains(part), "{error}");
    };
    refused(&|d| d.tokens = 0, ErrorKind::InvalidArgument, "tokens: expected 1 to");
    refused(&|d| d.tokens = u64::MAX, ErrorKind::InvalidArgument, "tokens: expected 1 to");
    refused(&|d| d.cached_tokens = 65, ErrorKind::InvalidArgument, "cached_tokens: expected at most the 64");
    refused(&|d| d.max_operation_bytes = 0, ErrorKind::InvalidArgument, "max_operation_bytes");
    refused(&|d| d.model.groups.clear(), ErrorKind::InvalidArgument, "model.groups");
    refused(&|d| d.producer.tp = 129, ErrorKind::Exhausted, "producer: 129 ranks");
    refused(&|d| d.consumer.pp = 129, ErrorKind::Exhausted, "consumer: 129 ranks");
    let wide = |d: &mut Deployment| {
        d.model.groups[0].layers = (0..1024).collect();
        d.consumer.tp = 33;
    };
    refused(&wide, ErrorKind::Exhausted, "consumer: its ranks hold 67584 parts");
    refused(&|d| d.consumer.pp = 5, ErrorKind::InvalidArgument, "the decode engine: 4 layers");
    refused(&|d| d.producer.block_size = vec![0], ErrorKind::InvalidArgument, "the prefill engine: KV-cache group 0");
    let whole = |d: &mut Deployment| {
        (d.producer.layout, d.consumer.layout) = (Layout::Whole, Layout::Whole);
        d.consumer.block_size = vec![32];
    };
    refused(&whole, ErrorKind::Incompatible, "block size of");
    let many = |d: &mut Deployment| {
        d.model.groups.push(GroupSpec::latent([4], 8));
        (d.tokens, d.producer.block_size) = (MAX_DESCRIBED_TOKENS, vec![1]);
    };
    refused(&many, ErrorKind::Exhausted, "blocks; use larger blocks");
}
