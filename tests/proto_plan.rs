//! Plans against an oracle: tagged byte arrays copied byte by byte over (layer, part, block, head, token, content).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::collections::HashMap;

use kvferry::ErrorKind;
use kvferry::proto::geometry::{Area, Geometry, Group, GroupKind};
use kvferry::proto::plan::{CopyPlan, RankPlan, Segment, peers};
use kvferry::proto::wire::{AgentMetadata, Blocks, EngineShape, MemoryKind, RankMetadata, RegionMetadata};
use kvferry::proto::{EngineId, Incarnation, RankId};
use proptest::prelude::*;

const SHAPE: EngineShape = EngineShape { tp: 1, pp: 1, dcp: 1 };

fn rank_metadata(geometry: Geometry, region_lens: &[u64]) -> RankMetadata {
    let region = |&len: &u64| RegionMetadata { base: 0x1000, len, kind: MemoryKind::Host, rkey: vec![1] };
    RankMetadata {
        engine: EngineId::new("engine").unwrap(),
        rank: RankId { pp: 0, tp: 0 },
        shape: SHAPE,
        compat: vec![],
        geometry,
        agent: AgentMetadata {
            name: "agent".into(),
            incarnation: Incarnation(1),
            ucx_version: "1.22".into(),
            address: vec![1, 2, 3],
            regions: region_lens.iter().map(region).collect(),
        },
    }
}

/// What both sides have in common.
#[derive(Debug, Clone)]
struct Cache {
    groups: usize,
    layers: usize,
    packed: bool,
    heads: u32,
    tokens: u32,
    content: u64,
}

/// How one side lays it out.
#[derive(Debug, Clone)]
struct Layout {
    /// Per block: heads outside tokens, or tokens outside heads.
    heads_first: bool,
    /// All layers of a group inside one block stride of one region, or a region per group and layer.
    blocks_first: bool,
    /// K and V next to each other in a block, or all blocks of K before all blocks of V.
    split_by_block: bool,
    /// All groups on the same memory, as vLLM's hybrid cache: ids are then unique over all groups.
    share: bool,
    blocks: u32,
    /// Unused bytes before each region's first block, between tokens or heads, and between blocks.
    lead: u64,
    inner_gap: u64,
    block_gap: u64,
    reverse_layers: bool,
}

fn lay_out(cache: &Cache, layout: &Layout) -> (Geometry, Vec<u64>) {
    let parts: &[&str] = if cache.packed { &["kv"] } else { &["k", "v"] };
    let (outer, inner) = if layout.heads_first { (cache.heads, cache.tokens) } else { (cache.tokens, cache.heads) };
    let inner_stride = cache.content + layout.inner_gap;
    let outer_stride = inner_stride * u64::from(inner);
    let (head_stride, token_stride) =
        if layout.heads_first { (outer_stride, inner_stride) } else { (inner_stride, outer_stride) };
    let page = outer_stride * u64::from(outer);
    let parts_in_block = if layout.split_by_block { parts.len() as u64 } else { 1 };
    let layers_in_block = if layout.blocks_first { cache.layers as u64 } else { 1 };
    let stride = page * parts_in_block * layers_in_block + layout.block_gap;
    let plane = stride * u64::from(layout.blocks);
    let planes = if layout.split_by_block { 1 } else { parts.len() as u64 };
    let memory_groups = if layout.share { 1 } else { cache.groups };
    let regions_per_group = if layout.blocks_first { 1 } else { cache.layers };
    let mut areas = Vec::new();
    for group in 0..cache.groups {
        for layer in 0..cache.layers {
            for (p, part) in parts.iter().enumerate() {
                let slot = if layout.reverse_layers { cache.layers - 1 - layer } else { layer };
                let region_group = if layout.share { 0 } else { group };
                let (region, in_block) =
                    if layout.blocks_first { (region_group, slot) } else { (region_group * cache.layers + slot, 0) };
                let part_offset = if layout.split_by_block { p as u64 * page } else { p as u64 * plane };
                areas.push(Area {
                    layer: format!("layers.{group}.{layer}"),
                    part: (*part).into(),
                    group: group as u32,
                    region: region as u32,
                    offset: layout.lead + in_block as u64 * page * parts_in_block + part_offset,
                    num_blocks: layout.blocks,
                    block_stride: stride,
                    heads: cache.heads,
                    first_head: 0,
                    total_heads: cache.heads,
                    head_stride,
                    tokens: cache.tokens,
                    token_stride,
                    content: cache.content,
                });
            }
        }
    }
    let groups = vec![Group::new(GroupKind::Full, cache.tokens); cache.groups];
    (Geometry { groups, areas }, vec![layout.lead + planes * plane; memory_groups * regions_per_group])
}

/// A value that tells where a byte was: side, region and offset.
fn tag(side: u64, region: usize, offset: usize) -> u64 {
    side << 60 | (region as u64) << 40 | offset as u64
}

fn memory(side: u64, lens: &[u64]) -> Vec<Vec<u64>> {
    lens.iter().enumerate().map(|(r, &len)| (0..len as usize).map(|at| tag(side, r, at)).collect()).collect()
}

/// The specification, byte by byte.
fn oracle(
    local: &RankMetadata,
    remote: &RankMetadata,
    l: &[Blocks],
    r: &[Blocks],
    dst: &mut [Vec<u64>],
    src: &[Vec<u64>],
) {
    let by_name: HashMap<_, _> = remote.geometry.areas.iter().map(|a| ((&a.layer, &a.part), a)).collect();
    let at = |a: &Area, b: u32, h: u32, t: u32, c: u64| {
        (a.offset + u64::from(b) * a.block_stride + u64::from(h) * a.head_stride + u64::from(t) * a.token_stride + c)
            as usize
    };
    for a in &local.geometry.areas {
        let other = by_name[&(&a.layer, &a.part)];
        for (&lb, &rb) in l[a.group as usize].ids().iter().zip(r[a.group as usize].ids()) {
            for h in 0..a.heads {
                for t in 0..a.tokens {
                    for c in 0..a.content {
                        dst[a.region as usize][at(a, lb, h, t, c)] = src[other.region as usize][at(other, rb, h, t, c)];
                    }
                }
            }
        }
    }
}

/// Runs the plan's operations, leaving off and taking up the expansion after every `pause` operations, and checks that
/// they stay inside and write no byte twice.
fn execute(plan: &CopyPlan, max: u64, dst: &mut [Vec<u64>], src: &[Vec<u64>]) -> usize {
    let mut written: Vec<Vec<bool>> = dst.iter().map(|r| vec![false; r.len()]).collect();
    let mut bytes = 0;
    let mut operations = 0;
    for op in plan.clone().expand(max) {
        assert!(op.len > 0 && op.len <= max.max(1), "{op:?}");
        let from = op.remote_offset as usize..(op.remote_offset + op.len) as usize;
        let to = op.local_offset as usize..(op.local_offset + op.len) as usize;
        for byte in &mut written[op.local_region as usize][to.clone()] {
            assert!(!*byte, "{op:?} writes a byte again");
            *byte = true;
        }
        dst[op.local_region as usize][to].copy_from_slice(&src[op.remote_region as usize][from]);
        bytes += op.len;
        operations += 1;
    }
    assert_eq!(bytes, plan.bytes());
    operations
}

fn layouts() -> impl Strategy<Value = Layout> {
    (any::<[bool; 4]>(), 1u32..9, 0u64..5, prop_oneof![3 => Just(0u64), 1 => 1u64..3], prop_oneof![Just(0u64), 1u64..7])
        .prop_map(
            |([heads_first, blocks_first, split_by_block, reverse_layers], blocks, lead, inner_gap, block_gap)| {
                Layout {
                    heads_first,
                    blocks_first,
                    split_by_block,
                    share: false,
                    blocks,
                    lead,
                    inner_gap,
                    block_gap,
                    reverse_layers,
                }
            },
        )
}

fn caches() -> impl Strategy<Value = Cache> {
    (1usize..3, 1usize..4, any::<bool>(), 1u32..4, 1u32..4, 1u64..5).prop_map(
        |(groups, layers, packed, heads, tokens, content)| Cache { groups, layers, packed, heads, tokens, content },
    )
}

#[derive(Debug, Clone)]
struct Case {
    local: RankMetadata,
    remote: RankMetadata,
    local_ids: Vec<Blocks>,
    remote_ids: Vec<Blocks>,
}

fn cases() -> impl Strategy<Value = Case> {
    (caches(), layouts(), layouts(), any::<[bool; 2]>(), any::<u64>(), 0u32..3).prop_map(
        |(cache, mut l, mut r, share, seed, mix)| {
            (l.share, r.share) = (share[0], share[1]);
            let (lg, lr) = lay_out(&cache, &l);
            let (rg, rr) = lay_out(&cache, &r);
            let mut state = seed | 1;
            let mut random = |bound: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % bound.max(1)
            };
            // Local ids without repeats (over all groups when they share memory), in runs with some disorder.
            let mut free: Vec<Vec<u32>> = vec![(0..l.blocks).collect(); if l.share { 1 } else { cache.groups }];
            if mix > 0 {
                for ids in &mut free {
                    for _ in 0..mix * 2 {
                        let (a, b) = (random(ids.len() as u64) as usize, random(ids.len() as u64) as usize);
                        ids.swap(a, b);
                    }
                }
            }
            let (mut local_ids, mut remote_ids) = (vec![], vec![]);
            for group in 0..cache.groups {
                let pool = &mut free[if l.share { 0 } else { group }];
                let count = random(pool.len() as u64 + 1) as usize;
                let mine: Vec<u32> = pool.drain(..count).collect();
                let shift = random(r.blocks.into()) as u32;
                let theirs: Vec<u32> = match mix {
                    2 => mine.iter().map(|_| random(r.blocks.into()) as u32).collect(),
                    _ => mine.iter().map(|id| (id + shift) % r.blocks).collect(),
                };
                local_ids.push(mine.into());
                remote_ids.push(theirs.into());
            }
            Case { local: rank_metadata(lg, &lr), remote: rank_metadata(rg, &rr), local_ids, remote_ids }
        },
    )
}

fn lens(m: &RankMetadata) -> Vec<u64> {
    m.agent.regions.iter().map(|r| r.len).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, ..ProptestConfig::default() })]

    #[test]
    fn operations_copy_what_the_oracle_copies(case in cases(), max in prop_oneof![1u64..40, Just(u64::MAX)]) {
        let plan = RankPlan::new(&case.local, &case.remote).unwrap();
        let copy = plan.request(&case.local_ids, &case.remote_ids).unwrap();
        let (local_lens, remote_lens) = (lens(&case.local), lens(&case.remote));
        copy.check(&local_lens, &remote_lens).unwrap();
        let src = memory(2, &remote_lens);
        let mut expected = memory(1, &local_lens);
        oracle(&case.local, &case.remote, &case.local_ids, &case.remote_ids, &mut expected, &src);
        let mut found = memory(1, &local_lens);
        let merged = execute(&copy, max, &mut found, &src);
        prop_assert_eq!(&found, &expected);
        // Any cut gives the same bytes.
        let mut single = memory(1, &local_lens);
        let cut = execute(&copy, 1, &mut single, &src);
        prop_assert_eq!(&single, &expected);
        prop_assert!(merged <= cut);
        prop_assert_eq!(cut as u64, copy.bytes());
        let bytes: u64 = (0u32..).zip(&case.local_ids).map(|(g, ids)| ids.len() as u64 * plan.block_bytes(g)).sum();
        prop_assert_eq!(copy.bytes(), bytes);
        let blocks: usize = case.local_ids.iter().map(Blocks::len).sum();
        prop_assert_eq!(copy.blocks(), blocks as u64);
    }

    #[test]
    fn merging_leaves_no_two_neighbours_apart(case in cases()) {
        let plan = RankPlan::new(&case.local, &case.remote).unwrap();
        let copy = plan.request(&case.local_ids, &case.remote_ids).unwrap();
        // In a dense segment no operation starts where another ends on both sides.
        for (index, segment) in copy.segments.iter().enumerate().filter(|(_, s)| s.is_dense()) {
            let one = CopyPlan { segments: vec![*segment].into(), lists: copy.lists.clone() };
            let ops: Vec<_> = one.expand(u64::MAX).collect();
            for a in &ops {
                prop_assert!(
                    !ops.iter().any(|b| a.local_offset + a.len == b.local_offset && a.remote_offset + a.len == b.remote_offset),
                    "segment {} leaves {:?} open", index, a
                );
            }
        }
    }

    #[test]
    fn an_unchecked_plan_never_panics(
        segments in prop::collection::vec((0u32..3, any::<[u64; 5]>()), 0..4),
        lists in prop::collection::vec((prop::collection::vec(any::<u32>(), 0..5), prop::collection::vec(any::<u32>(), 0..5)), 0..3),
        max in any::<u64>(),
    ) {
        let segments: Vec<Segment> = segments.into_iter().map(|(list, [a, b, c, d, len])| Segment {
            list, local_region: 0, remote_region: 0, local_offset: a, remote_offset: b, local_stride: c, remote_stride: d, len,
        }).collect();
        let lists = lists.into_iter().map(|(l, r)| kvferry::proto::plan::BlockPair { local: l.into(), remote: r.into() }).collect();
        let plan = CopyPlan { segments: segments.into(), lists };
        let _ = (plan.bytes(), plan.blocks(), plan.check(&[1 << 40], &[1 << 40]));
        prop_assert!(plan.expand(max).take(100).count() <= 100);
    }
}

fn dense(blocks: u32) -> RankMetadata {
    let cache = Cache { groups: 2, layers: 2, packed: false, heads: 2, tokens: 4, content: 8 };
    let layout = Layout {
        heads_first: true,
        blocks_first: false,
        split_by_block: false,
        share: false,
        blocks,
        lead: 0,
        inner_gap: 0,
        block_gap: 0,
        reverse_layers: false,
    };
    let (geometry, lens) = lay_out(&cache, &layout);
    rank_metadata(geometry, &lens)
}

fn blocks(ids: &[u32]) -> Blocks {
    ids.into()
}

#[test]
fn contiguous_pages_become_one_segment_each_and_consecutive_blocks_one_operation() {
    let m = dense(16);
    let plan = RankPlan::new(&m, &m).unwrap();
    assert_eq!(plan.segments().len(), 8);
    assert!(plan.segments().iter().all(|s| s.is_dense() && s.len == 64));
    assert_eq!((plan.readers(), plan.block_bytes(0), plan.block_bytes(2)), (1, 256, 0));
    let copy = plan.request(&[blocks(&[3, 4, 5, 9]), blocks(&[])], &[blocks(&[0, 1, 2, 3]), blocks(&[])]).unwrap();
    let lens: Vec<u64> = copy.clone().expand(u64::MAX).map(|op| op.len).collect();
    assert_eq!(lens, [192, 64, 192, 64, 192, 64, 192, 64]);
    // The bound cuts inside blocks too, and the expansion can be left and taken up again.
    let mut expander = copy.expand(100);
    let first: Vec<u64> = expander.by_ref().take(2).map(|op| op.len).collect();
    let rest: Vec<u64> = expander.take(2).map(|op| op.len).collect();
    assert_eq!((first, rest), (vec![100, 92], vec![64, 100]));
}

#[test]
fn areas_that_are_neighbours_in_a_block_become_one_segment() {
    let cache = Cache { groups: 1, layers: 3, packed: false, heads: 2, tokens: 4, content: 8 };
    let layout = Layout {
        heads_first: true,
        blocks_first: true,
        split_by_block: true,
        share: false,
        blocks: 4,
        lead: 5,
        inner_gap: 0,
        block_gap: 0,
        reverse_layers: false,
    };
    let (geometry, lens) = lay_out(&cache, &layout);
    let m = rank_metadata(geometry, &lens);
    let plan = RankPlan::new(&m, &m).unwrap();
    assert_eq!(plan.segments().len(), 1);
    assert!(plan.segments()[0].is_dense());
    // With the layers in another order on one side only pages of a layer hang together.
    let (geometry, lens) = lay_out(&cache, &Layout { reverse_layers: true, ..layout.clone() });
    let other = RankPlan::new(&m, &rank_metadata(geometry, &lens)).unwrap();
    assert_eq!(other.segments().iter().map(|s| s.len).collect::<Vec<_>>(), [128, 128, 128]);
    // Heads and tokens swapped: only the content does, and where one part's last and the next part's first touch.
    let (geometry, lens) = lay_out(&cache, &Layout { heads_first: false, ..layout });
    let swapped = RankPlan::new(&m, &rank_metadata(geometry, &lens)).unwrap();
    assert_eq!(swapped.segments().iter().map(|s| s.len).sum::<u64>(), 6 * 64);
    assert_eq!(swapped.segments().iter().filter(|s| s.len == 8).count(), 6 * 8 - 2 * 5);
    assert_eq!(swapped.segments().iter().filter(|s| s.len == 16).count(), 5);
}

#[test]
fn pairs_are_reordered_only_where_that_merges_more() {
    let m = dense(16);
    let plan = RankPlan::new(&m, &m).unwrap();
    let none = || (blocks(&[]), blocks(&[]));
    let pair = |l: &[u32], r: &[u32]| {
        let copy = plan.request(&[blocks(l), none().0], &[blocks(r), none().1]).unwrap();
        (copy.lists[0].local.ids().to_vec(), copy.lists[0].remote.ids().to_vec())
    };
    assert_eq!(pair(&[5, 4, 3], &[2, 1, 0]), (vec![3, 4, 5], vec![0, 1, 2]));
    assert_eq!(pair(&[9, 4, 2], &[2, 7, 0]), (vec![9, 4, 2], vec![2, 7, 0]));
}

/// Asserts the kind of an error and that its text has all of `parts`.
fn refused<T: std::fmt::Debug>(result: kvferry::Result<T>, kind: ErrorKind, parts: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.message().contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn requests_that_do_not_fit_are_refused_by_name() {
    let (local, remote) = (dense(16), dense(8));
    let plan = RankPlan::new(&local, &remote).unwrap();
    let request = |l: &[&[u32]], r: &[&[u32]]| {
        let lists = |side: &[&[u32]]| side.iter().map(|ids| blocks(ids)).collect::<Vec<_>>();
        plan.request(&lists(l), &lists(r))
    };
    assert_eq!(request(&[&[], &[]], &[&[], &[]]).unwrap().bytes(), 0);
    assert!(request(&[&[15], &[0]], &[&[7], &[0]]).is_ok());
    let invalid = ErrorKind::InvalidArgument;
    refused(request(&[&[1]], &[&[1], &[]]), invalid, &["1 local block lists", "2 KV-cache groups"]);
    refused(request(&[&[], &[]], &[&[], &[], &[]]), invalid, &["3 remote block lists"]);
    refused(request(&[&[], &[1, 2]], &[&[], &[1]]), invalid, &["group 1", "2 local and 1 remote"]);
    refused(request(&[&[16], &[]], &[&[0], &[]]), ErrorKind::OutOfRange, &["group 0", "local block 16", "16 blocks"]);
    refused(
        request(&[&[], &[3, 1]], &[&[], &[8, 0]]),
        ErrorKind::OutOfRange,
        &["group 1", "remote block 8", "8 blocks"],
    );
    refused(request(&[&[4, 2, 4], &[]], &[&[0, 1, 2], &[]]), invalid, &["group 0", "local block 4", "twice"]);
    // The same remote block may be read twice.
    assert!(request(&[&[4, 2], &[]], &[&[1, 1], &[]]).is_ok());
}

#[test]
fn groups_on_the_same_memory_must_not_write_a_block_twice() {
    let cache = Cache { groups: 2, layers: 2, packed: true, heads: 2, tokens: 4, content: 8 };
    let layout = Layout {
        heads_first: true,
        blocks_first: false,
        split_by_block: true,
        share: true,
        blocks: 8,
        lead: 0,
        inner_gap: 0,
        block_gap: 0,
        reverse_layers: false,
    };
    let (geometry, lens) = lay_out(&cache, &layout);
    let m = rank_metadata(geometry, &lens);
    let plan = RankPlan::new(&m, &m).unwrap();
    let request = |a: &[u32], b: &[u32]| plan.request(&[blocks(a), blocks(b)], &[blocks(a), blocks(b)]);
    assert!(request(&[1, 2], &[4, 3]).is_ok());
    refused(request(&[1, 2], &[4, 2]), ErrorKind::InvalidArgument, &["local block 2", "groups 0 and 1", "twice"]);
    // On separate memory the same ids are other blocks.
    let separate = dense(8);
    let plan = RankPlan::new(&separate, &separate).unwrap();
    assert!(plan.request(&[blocks(&[1, 2]), blocks(&[2])], &[blocks(&[1, 2]), blocks(&[2])]).is_ok());
}

#[test]
fn plans_from_outside_are_checked() {
    let segment = Segment {
        list: 0,
        local_region: 0,
        remote_region: 1,
        local_offset: 8,
        remote_offset: 0,
        local_stride: 16,
        remote_stride: 32,
        len: 8,
    };
    let plan = |s: Segment, l: &[u32], r: &[u32]| CopyPlan {
        segments: vec![s].into(),
        lists: vec![kvferry::proto::plan::BlockPair { local: blocks(l), remote: blocks(r) }],
    };
    assert!(plan(segment, &[0, 3], &[0, 3]).check(&[64], &[0, 104]).is_ok());
    refused(
        plan(segment, &[0, 4], &[0, 3]).check(&[64], &[0, 104]),
        ErrorKind::OutOfRange,
        &["local block 4", "64 bytes"],
    );
    refused(
        plan(segment, &[0, 3], &[0, 4]).check(&[64], &[0, 104]),
        ErrorKind::OutOfRange,
        &["remote block 4", "104 bytes"],
    );
    refused(
        plan(segment, &[0], &[0, 1]).check(&[64], &[0, 104]),
        ErrorKind::InvalidArgument,
        &["1 local and 2 remote"],
    );
    refused(
        plan(segment, &[0], &[0]).check(&[64], &[104]),
        ErrorKind::InvalidArgument,
        &["remote region 1", "there are 1"],
    );
    refused(
        plan(Segment { list: 7, ..segment }, &[0], &[0]).check(&[64], &[0, 104]),
        ErrorKind::InvalidArgument,
        &["block list 7"],
    );
    refused(
        plan(Segment { local_stride: u64::MAX, ..segment }, &[3], &[0]).check(&[64], &[0, 104]),
        ErrorKind::OutOfRange,
        &["local block 3"],
    );
}

#[test]
fn engines_of_other_shapes_are_refused_by_the_name_of_what_differs() {
    let local = dense(8);
    let changed = |change: &dyn Fn(&mut RankMetadata)| {
        let mut m = local.clone();
        change(&mut m);
        RankPlan::new(&local, &m)
    };
    let bad = ErrorKind::Incompatible;
    refused(
        changed(&|m| m.shape.tp = 2),
        bad,
        &["tensor-parallel size", "1 here", "2 on the other side", "equal shape"],
    );
    refused(changed(&|m| m.shape.pp = 2), bad, &["pipeline-parallel size"]);
    refused(changed(&|m| m.shape.dcp = 2), bad, &["decode-context-parallel size"]);
    refused(changed(&|m| m.rank.tp = 1), bad, &["rank differs", "(pp 0, tp 0)", "(pp 0, tp 1)"]);
    refused(
        changed(&|m| m.geometry.groups[1].block_size = 8),
        bad,
        &["block size of KV-cache group 1", "4 here", "8 on"],
    );
    refused(
        changed(&|m| m.geometry.groups[1].kind = GroupKind::SlidingWindow { window: 9 }),
        bad,
        &["kind of KV-cache group 1", "full here", "sliding window of 9 tokens on"],
    );
    refused(
        changed(&|m| {
            m.geometry.groups.truncate(1);
            m.geometry.areas.retain(|a| a.group == 0);
        }),
        bad,
        &["number of KV-cache groups", "2 here", "1 on"],
    );
    refused(
        changed(&|m| m.geometry.areas.retain(|a| a.layer != "layers.0.1")),
        bad,
        &["set of layers", "4 layers", "\"layers.0.1\" alone", "3 layers"],
    );
    refused(
        changed(&|m| {
            m.geometry.areas.retain(|a| a.layer != "layers.0.1" || a.part == "k");
            for a in m.geometry.areas.iter_mut().filter(|a| a.layer == "layers.0.1") {
                a.part = "kv".into();
            }
        }),
        bad,
        &["layout of layer \"layers.0.1\"", "k+v here", "kv on"],
    );
    let area = |change: fn(&mut Area)| changed(&|m| change(&mut m.geometry.areas[3]));
    refused(
        area(|a| a.total_heads = 4),
        bad,
        &["number of KV heads of the model", "layers.0.1", "\"v\"", "2 here", "4 on"],
    );
    refused(area(|a| a.heads = 1), bad, &["number of KV heads per rank", "2 here", "1 on"]);
    refused(area(|a| a.tokens = 2), bad, &["tokens per block", "4 here", "2 on"]);
    refused(area(|a| a.content = 4), bad, &["bytes per token and head", "8 here", "4 on"]);
    let mut half = dense(8);
    half.geometry.areas[0].total_heads = 4;
    let mut other_half = half.clone();
    other_half.geometry.areas[0].first_head = 2;
    refused(RankPlan::new(&half, &other_half), bad, &["first KV head", "0 here", "2 on"]);
    // A broken geometry is told from an incompatible one, and which side it is on.
    refused(area(|a| a.offset = 1 << 40), ErrorKind::OutOfRange, &["rank (pp 0, tp 0) of engine engine", "layers.0.1"]);
}

#[test]
fn a_rank_reads_from_its_counterpart() {
    let shape = EngineShape { tp: 2, pp: 2, dcp: 1 };
    let rank = RankId { pp: 1, tp: 0 };
    assert_eq!(peers(rank, shape, shape).unwrap(), [rank]);
    refused(peers(RankId { pp: 2, tp: 0 }, shape, shape), ErrorKind::InvalidArgument, &["(pp 2, tp 0)", "pp 2"]);
    let other = EngineShape { tp: 4, ..shape };
    refused(peers(rank, shape, other), ErrorKind::Incompatible, &["tensor-parallel size", "2 here", "4 on"]);
}
