//! Plans by example: what merges, which requests are refused, and plans from outside. Random shapes against an oracle are
//! in `proto_shapes`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::sync::Arc;

use kvferry_proto::ErrorKind;
use kvferry_proto::geometry::{Group, GroupKind};
use kvferry_proto::plan::{
    BlockPair, CopyPlan, Expander, HeldPart, Holding, ORDERED_PAIRS, Operation, RankPlan, Segment, Wanted, assign,
};
use kvferry_proto::shape::{EngineSpec, GroupSpec, Layout, ModelSpec, Parts};
use kvferry_proto::wire::{Blocks, RankMetadata};
use kvferry_proto::{EngineId, RankId};
use proptest::prelude::*;

#[test]
fn ranks_hold_the_same_if_rank_tokens_and_heads_are_the_same_in_any_order() {
    let part = |layer: &str, part: &str| HeldPart {
        layer: layer.into(),
        part: part.into(),
        group: 0,
        first_head: 2,
        heads: 2,
    };
    let group = Group { kind: GroupKind::Full, block_size: 16, token_ranks: 2, token_rank: 1, token_interleave: 1 };
    let parts = vec![part("1", "k"), part("1", "v"), part("2", "k")];
    let holding = Holding { rank: RankId { pp: 0, tp: 1 }, groups: vec![group], parts };
    let but = |change: &dyn Fn(&mut Holding)| {
        let mut other = holding.clone();
        change(&mut other);
        assert_eq!(holding.holds_as(&other), other.holds_as(&holding));
        holding.holds_as(&other)
    };
    assert!(but(&|_| {}));
    assert!(but(&|other| other.parts.rotate_left(1)));
    assert!(but(&|other| other.groups[0].block_size = 32), "of other block sizes, the same tokens");
    assert!(!but(&|other| other.rank.pp = 1));
    assert!(!but(&|other| other.groups[0].token_rank = 0));
    assert!(!but(&|other| other.groups[0].token_ranks = 4));
    assert!(!but(&|other| other.parts[0].heads = 1));
    assert!(!but(&|other| other.parts[2].layer = "3".into()));
    assert!(!but(&|other| drop(other.parts.pop())));
}

#[test]
fn heads_that_one_rank_has_are_one_cell_wherever_another_rank_begins() {
    let holding = |tp: u32, first_head: u32, heads: u32| Holding {
        rank: RankId { pp: 0, tp },
        groups: vec![Group::new(GroupKind::Full, 16)],
        parts: vec![HeldPart { layer: "0".into(), part: "k".into(), group: 0, first_head, heads }],
    };
    let (reader, whole) = (RankId { pp: 0, tp: 0 }, RankId { pp: 0, tp: 0 });
    // The other rank's heads begin and end within those that are read.
    let shares = assign(reader, &[holding(0, 0, 9)], &[holding(0, 0, 9), holding(1, 4, 4)], 0).unwrap();
    let cells: Vec<_> = shares[&whole].cells.iter().map(|cell| (cell.first_head, cell.heads)).collect();
    assert_eq!(cells, [(0, 9)]);
}

/// The metadata of an engine's only rank.
fn only_rank(spec: &EngineSpec, model: &ModelSpec) -> RankMetadata {
    spec.ranks(model).unwrap()[0].metadata(&EngineId::new("engine").unwrap(), spec.shape())
}

fn plan(local: &RankMetadata, remote: &RankMetadata) -> kvferry_proto::Result<RankPlan> {
    let holding = |m: &RankMetadata| vec![kvferry_proto::plan::Holding::new(m.rank, &m.geometry)];
    let shares = assign(local.rank, &holding(local), &holding(remote), 0)?;
    RankPlan::new(local, remote, &shares[&remote.rank].cells)
}

/// Two groups of two layers; 2 heads x 4 tokens x 8 bytes, 64 bytes a block and part.
fn two_groups() -> ModelSpec {
    let group = |layers| GroupSpec::attention(GroupKind::Full, layers, 2, 8, 8);
    ModelSpec { groups: vec![group(0..2), group(2..4)] }
}

/// Every layer and part in a region of its own, without gaps.
fn dense_spec(num_blocks: u32) -> EngineSpec {
    EngineSpec {
        block_size: vec![4],
        layout: Layout::HeadMajor,
        parts: Parts::Regions,
        num_blocks,
        ..EngineSpec::default()
    }
}

fn dense(blocks: u32) -> RankMetadata {
    only_rank(&dense_spec(blocks), &two_groups())
}

/// Lengths of regions, as a check asks for them.
fn by_index(lens: &[u64]) -> impl Fn(u32) -> Option<u64> {
    |region| lens.get(region as usize).copied()
}

fn blocks(ids: &[u32]) -> Blocks {
    ids.into()
}

/// Whole blocks of 4 tokens, the same lists for both groups, from the sequence's start on.
fn copy_of(plan: &RankPlan, local: &[u32], remote: &[u32]) -> kvferry_proto::Result<CopyPlan> {
    let (l, r) = (vec![blocks(local); 2], vec![blocks(remote); 2]);
    let tokens = 4 * local.len() as u64;
    plan.request(&Wanted {
        local: &l,
        remote: &r,
        tokens: (0, tokens),
        remote_tokens: 4 * remote.len() as u64,
        null_block: None,
        window_only: true,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn merging_leaves_no_two_neighbours_apart(
        local in Just((0..12).collect::<Vec<u32>>()).prop_shuffle(),
        remote in Just((0..12).collect::<Vec<u32>>()).prop_shuffle(),
        shuffled in any::<bool>(),
        count in 1usize..13,
    ) {
        let m = dense(12);
        // Runs with a few breaks, or no order at all.
        let cut = count / 2;
        let (local, remote): (Vec<u32>, Vec<u32>) = if shuffled {
            (local[..count].to_vec(), remote[..count].to_vec())
        } else {
            ((0..12).cycle().skip(cut).take(count).collect(), (0..12).take(count).collect())
        };
        let copy = copy_of(&plan(&m, &m).unwrap(), &local, &remote).unwrap();
        prop_assert_eq!(copy.bytes(), 8 * 64 * count as u64);
        for segment in &*copy.segments {
            prop_assert!(segment.is_dense());
            let one = CopyPlan { segments: vec![*segment].into(), lists: copy.lists.clone() };
            let ops: Vec<_> = in_order(one, u64::MAX).collect();
            for a in &ops {
                prop_assert!(
                    !ops.iter().any(|b| a.local_offset + a.len == b.local_offset && a.remote_offset + a.len == b.remote_offset),
                    "segment {:?} leaves {:?} open", segment, a
                );
            }
            // As few as the pairs of ids allow.
            let follows = |i: usize| (0..count).any(|j| local[j] + 1 == local[i] && remote[j] + 1 == remote[i]);
            prop_assert_eq!(ops.len(), (0..count).filter(|&i| !follows(i)).count());
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
        let lists = lists.into_iter().map(|(l, r)| BlockPair { local: l.into(), remote: r.into() }).collect();
        let plan = CopyPlan { segments: segments.into(), lists };
        let _ = (plan.bytes(), plan.blocks(), plan.check(by_index(&[1 << 40]), by_index(&[1 << 40])));
        prop_assert!(plan.clone().expand(max).take(100).count() <= 100);
        prop_assert!(in_order(plan, max).take(100).count() <= 100);
    }
}

#[test]
fn contiguous_pages_become_one_segment_each_and_consecutive_blocks_one_operation() {
    let m = dense(16);
    let plan = plan(&m, &m).unwrap();
    assert_eq!(plan.segments().len(), 8);
    assert!(plan.segments().iter().all(|s| s.is_dense() && s.len == 64));
    let mut copy = copy_of(&plan, &[3, 4, 5, 9], &[0, 1, 2, 3]).unwrap();
    assert_eq!((copy.bytes(), copy.blocks()), (8 * 4 * 64, 8));
    let lens: Vec<u64> = copy.clone().expand(u64::MAX).map(|op| op.len).collect();
    assert_eq!(lens, [192, 64].repeat(8));
    // The bound cuts inside blocks too, and the expansion can be left and taken up again.
    let mut expander = copy.clone().expand(100);
    let first: Vec<u64> = expander.by_ref().take(2).map(|op| op.len).collect();
    let rest: Vec<u64> = expander.take(2).map(|op| op.len).collect();
    assert_eq!((first, rest), (vec![100, 92], vec![64, 100]));
    assert!(copy.clone().expand(0).all(|op| op.len == 1));
    // What has no blocks is passed over.
    copy.lists[0] = BlockPair::default();
    assert_eq!(copy.expand(u64::MAX).count(), 8);
}

#[test]
fn areas_that_are_neighbours_in_a_block_become_one_segment() {
    let model = |layers: [u32; 3]| ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, layers, 2, 8, 8)] };
    let spec = EngineSpec { parts: Parts::InBlock, layers_in_block: true, lead: 5, ..dense_spec(4) };
    let m = only_rank(&spec, &model([0, 1, 2]));
    let same = plan(&m, &m).unwrap();
    assert_eq!(same.segments().len(), 1);
    assert!(same.segments()[0].is_dense());
    let lens = |plan: RankPlan| plan.segments().iter().map(|s| s.len).collect::<Vec<_>>();
    // With the layers in another order on one side only pages of a layer hang together.
    assert_eq!(lens(plan(&m, &only_rank(&spec, &model([2, 1, 0]))).unwrap()), [128, 128, 128]);
    // With a gap between the blocks there is still one run a block, which no block continues.
    let gapped = plan(&m, &only_rank(&EngineSpec { gap: 1, ..spec.clone() }, &model([0, 1, 2]))).unwrap();
    assert!(!gapped.segments()[0].is_dense());
    assert_eq!(lens(gapped), [384]);
    // Heads and tokens swapped: only the content does, and where one part's last and the next part's first touch.
    let swapped =
        lens(plan(&m, &only_rank(&EngineSpec { layout: Layout::TokenMajor, ..spec }, &model([0, 1, 2]))).unwrap());
    assert_eq!(swapped.iter().sum::<u64>(), 6 * 64);
    assert_eq!(swapped.iter().filter(|len| **len == 8).count(), 6 * 8 - 2 * 5);
    assert_eq!(swapped.iter().filter(|len| **len == 16).count(), 5);
}

#[test]
fn blocks_of_other_sizes_merge_where_the_memory_does() {
    // Token-major without gaps: 4 blocks of 4 tokens are one block of 16, so consecutive ones are one operation.
    let spec = |size| EngineSpec { layout: Layout::TokenMajor, block_size: vec![size], ..dense_spec(32) };
    let (small, large) = (only_rank(&spec(4), &two_groups()), only_rank(&spec(16), &two_groups()));
    for (local, remote, l, r) in
        [(&large, &small, vec![2, 3], (8..16).collect()), (&small, &large, (8..16).collect(), vec![2, 3])]
    {
        let plan = plan(local, remote).unwrap();
        assert_eq!(plan.segments().len(), 8);
        let lists = |ids: &Vec<u32>| vec![blocks(ids); 2];
        let (l, r): (Vec<Blocks>, Vec<Blocks>) = (lists(&l), lists(&r));
        let wanted =
            Wanted { local: &l, remote: &r, tokens: (0, 32), remote_tokens: 32, null_block: None, window_only: true };
        let ops: Vec<_> = plan.request(&wanted).unwrap().expand(u64::MAX).collect();
        assert_eq!(ops.len(), 8);
        assert!(ops.iter().all(|op| op.len == 32 * 16 && op.local_offset == 32 * 16 && op.remote_offset == 32 * 16));
    }
}

#[test]
fn physical_blocks_with_gaps_between_them_are_no_finer_blocks() {
    // Blocks of 4 tokens in two physical ones of 2, which begin 20 bytes apart though 2 tokens take 16.
    let model = ModelSpec { groups: vec![GroupSpec::latent(0..1, 8)] };
    let spec = |size| EngineSpec { layout: Layout::TokenMajor, block_size: vec![size], ..dense_spec(4) };
    let mut local = only_rank(&spec(4), &model);
    let area = &mut local.geometry.areas[0];
    (area.pages, area.page_stride, area.tokens, area.content) = (2, 20, 2, 4);
    let mut remote = only_rank(&spec(2), &model);
    remote.geometry.areas[0].content = 4;
    let (l, r) = ([blocks(&[1])], [blocks(&[3, 2])]);
    let wanted =
        Wanted { local: &l, remote: &r, tokens: (0, 4), remote_tokens: 4, null_block: None, window_only: true };
    let copy = plan(&local, &remote).unwrap().request(&wanted).unwrap();
    let mut places: Vec<_> = copy.expand(u64::MAX).map(|op| (op.local_offset, op.remote_offset, op.len)).collect();
    places.sort_unstable();
    assert_eq!(places, [(32, 48, 4), (40, 56, 4), (52, 32, 4), (60, 40, 4)]);
}

#[test]
fn pairs_are_put_in_the_order_of_their_remote_blocks() {
    let m = dense(16);
    let plan = plan(&m, &m).unwrap();
    let copy = |l: &[u32], r: &[u32]| copy_of(&plan, l, r).unwrap();
    let pair = |l: &[u32], r: &[u32]| {
        let expander = in_order(copy(l, r), u64::MAX);
        let pair = &expander.plan().lists[0];
        (pair.local.ids().to_vec(), pair.remote.ids().to_vec())
    };
    assert_eq!(pair(&[5, 4, 3], &[2, 1, 0]), (vec![3, 4, 5], vec![0, 1, 2]));
    assert_eq!(pair(&[9, 4, 2], &[2, 7, 0]), (vec![2, 9, 4], vec![0, 2, 7]));
    assert_eq!(pair(&[], &[]), (vec![], vec![]));
    // The same bytes, in fewer operations, of which the plan tells before they are made.
    let copy = copy(&[9, 1, 8, 7, 3, 2], &[4, 11, 3, 2, 13, 12]);
    let one = copy.segments[0].len;
    assert_eq!(sorted(in_order(copy.clone(), one)), sorted(copy.clone().expand(one)));
    let ordered = in_order(copy.clone(), u64::MAX);
    assert_eq!((copy.runs(), ordered.plan().runs()), (48, 16));
    assert_eq!((copy.mean_run(), ordered.plan().mean_run()), (Some(one), Some(3 * one)));
    assert_eq!(CopyPlan::default().mean_run(), None);
    assert_eq!(ordered.count(), 16);
    // A segment without bytes, as a peer or a caller may give, is no operation.
    let mut empty = copy.clone();
    empty.segments = empty.segments.iter().map(|&segment| Segment { len: 0, ..segment }).collect();
    assert_eq!((empty.runs(), empty.expand(one).count()), (0, 0));
}

/// Every byte once, whatever mixture of operations and blocks a plan is taken in.
#[test]
fn blocks_take_the_place_of_operations() {
    let count = ORDERED_PAIRS as u32 + 50;
    let (rising, falling): (Vec<u32>, Vec<u32>) = ((0..count).collect(), (0..count).rev().collect());
    let broken: Vec<u32> = (7..count).chain(0..7).collect();
    let segment = |list, region, len, stride| Segment {
        list,
        local_region: region,
        remote_region: region,
        local_offset: 5,
        remote_offset: 0,
        local_stride: stride,
        remote_stride: stride,
        len,
    };
    let segments: Arc<[Segment]> =
        [segment(0, 0, 8, 8), segment(1, 1, 3, 8), segment(0, 2, 8, 9), segment(1, 3, 8, 8)].into();
    let pair = |l: &[u32], r: &[u32]| BlockPair { local: l.into(), remote: r.into() };
    for lists in
        [vec![pair(&rising, &falling), pair(&rising, &broken)], vec![pair(&broken, &broken), pair(&rising, &rising)]]
    {
        let copy = CopyPlan { segments: segments.clone(), lists };
        let bytes =
            |op: Operation| (0..op.len).map(move |at| (op.local_region, op.local_offset + at, op.remote_offset + at));
        let mut expected: Vec<_> = copy.clone().expand(u64::MAX).flat_map(bytes).collect();
        expected.sort_unstable();
        for (ordered, longest, turn) in
            [(false, u64::MAX, 1), (true, u64::MAX, 2), (false, 5, 3), (true, 20, 4), (true, 8, 1)]
        {
            let mut expander = copy.clone().expand(longest);
            if ordered {
                expander.order();
            }
            let (mut taken, mut by_blocks) = (Vec::new(), 0);
            for number in 0u64.. {
                let Some(op) = expander.next() else { break };
                if number % 3 == turn % 3 {
                    expander.split();
                    assert_eq!(expander.blocks(), None);
                }
                let Some(blocks) = expander.blocks().filter(|_| number % 5 != turn % 5) else {
                    taken.extend(bytes(op));
                    continue;
                };
                let s = blocks.segment;
                assert_eq!(blocks.local.len(), blocks.remote.len());
                let some = blocks.local.len().min((number * 37 % 1000) as usize + 1);
                for (&l, &r) in blocks.local[..some].iter().zip(blocks.remote) {
                    taken.extend((0..s.len).map(|at| {
                        let place = (s.local_offset + u64::from(l) * s.local_stride, u64::from(r) * s.remote_stride);
                        (s.local_region, place.0 + at, s.remote_offset + place.1 + at)
                    }));
                }
                by_blocks += some;
                expander.take_blocks(some);
                assert_eq!(expander.blocks(), None);
            }
            assert_eq!((expander.next(), expander.blocks()), (None, None));
            taken.sort_unstable();
            assert!(taken == expected && by_blocks > 0, "{ordered} {longest}");
        }
    }
}

fn in_order(plan: CopyPlan, longest: u64) -> Expander {
    let mut expander = plan.expand(longest);
    expander.order();
    expander
}

fn sorted(operations: Expander) -> Vec<Operation> {
    let mut all: Vec<_> = operations.collect();
    all.sort_unstable_by_key(|op| (op.local_region, op.local_offset, op.remote_offset));
    all
}

/// Each piece once, also where a run goes on from pairs in order into those that are not yet, and where lists are shared.
#[test]
fn long_lists_are_put_in_order_piece_by_piece() {
    let count = 3 * ORDERED_PAIRS as u32 + 5;
    let first = 100..100 + ORDERED_PAIRS as u32;
    // A piece in reverse that, in order, ends where the next one goes on, and smaller ids after that.
    let broken: Vec<u32> =
        first.clone().rev().chain(first.end..first.end + 9).chain(0..100).chain(first.end + 9..count).collect();
    let falling: Vec<u32> = (0..count).rev().collect();
    let thirds: Vec<u32> = (0..3).flat_map(|one| (one..count).step_by(3)).collect();
    let rising: Vec<u32> = (0..count).collect();
    let segment = |list, region, len| Segment {
        list,
        local_region: region,
        remote_region: region,
        local_offset: 7,
        remote_offset: 0,
        local_stride: 8,
        remote_stride: 8,
        len,
    };
    let segments: Arc<[Segment]> =
        [segment(0, 0, 8), segment(1, 1, 3), segment(0, 2, 8), segment(1, 3, 8), segment(2, 4, 8)].into();
    let orders = [&broken, &falling, &thirds, &rising];
    for remote in orders {
        for local in orders {
            let pair = |l: &[u32], r: &[u32]| BlockPair { local: l.into(), remote: r.into() };
            let lists = vec![pair(local, remote), pair(remote, local), pair(&rising, &rising)];
            let copy = CopyPlan { segments: segments.clone(), lists };
            assert_eq!(sorted(in_order(copy.clone(), 8)), sorted(copy.clone().expand(8)));
            let mut expander = in_order(copy.clone(), 8);
            let offsets: Vec<_> = expander.by_ref().take(count as usize).map(|op| op.remote_offset).collect();
            for piece in offsets.chunks(ORDERED_PAIRS) {
                // What a run took of the next piece.
                assert!(piece.windows(2).filter(|pair| pair[0] > pair[1]).count() <= 1);
            }
            assert_eq!(expander.count(), 4 * count as usize);
            assert_eq!(copy.lists[0], pair(local, remote), "others who have these lists keep them as they were");
        }
    }
}

/// Asserts the kind of an error and that its text has all of `parts`.
fn refused<T: std::fmt::Debug>(result: kvferry_proto::Result<T>, kind: ErrorKind, parts: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.message().contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn requests_that_do_not_fit_are_refused_by_name() {
    let (local, remote) = (dense(16), dense(8));
    let plan = plan(&local, &remote).unwrap();
    assert_eq!(copy_of(&plan, &[], &[]).unwrap().bytes(), 0);
    assert!(copy_of(&plan, &[15], &[7]).is_ok());
    let invalid = ErrorKind::InvalidArgument;
    let lists = |side: &[&[u32]]| side.iter().map(|ids| blocks(ids)).collect::<Vec<_>>();
    let request = |l: &[&[u32]], r: &[&[u32]], tokens: (u64, u64), remote_tokens: u64, null_block: Option<u32>| {
        let (local, remote) = (&*lists(l), &*lists(r));
        plan.request(&Wanted { local, remote, tokens, remote_tokens, null_block, window_only: true })
    };
    let one: &[&[u32]] = &[&[1], &[1]];
    refused(request(&[&[1]], one, (0, 4), 4, None), invalid, &["1 local block lists", "2 KV-cache groups"]);
    refused(request(one, &[&[1], &[], &[]], (0, 4), 4, None), invalid, &["3 remote block lists"]);
    refused(request(one, one, (0, 5), 4, None), invalid, &["tokens 0 to 5", "the other side holds 4"]);
    refused(request(one, one, (3, 2), 4, None), invalid, &["tokens 3 to 2"]);
    let text = ["group 1", "2 local blocks of 4 tokens", "for 4 tokens, which 1 hold"];
    refused(request(&[&[1], &[1, 2]], one, (0, 4), 4, None), invalid, &text);
    let text = ["group 0", "2 remote blocks of 4 tokens", "for 4 tokens, which 1 hold"];
    refused(request(one, &[&[1, 2], &[1]], (0, 4), 4, None), invalid, &text);
    let two: &[&[u32]] = &[&[1, 2], &[1, 2]];
    let text = ["group 1", "8 tokens lie in 2 remote blocks of 4 tokens, 1 were given", "kv_transfer_params"];
    refused(request(two, &[&[1, 2], &[1]], (0, 8), 8, None), invalid, &text);
    let text = ["group 0", "tokens 0 to 8 lie in 2 local blocks of 4 tokens, 1 were given"];
    refused(request(one, two, (0, 8), 8, None), invalid, &text);
    assert!(request(one, two, (4, 8), 8, None).is_ok());
    // Only a window may have null blocks.
    refused(
        request(&[&[0, 2], &[1, 2]], two, (0, 8), 8, Some(0)),
        invalid,
        &["group 0", "no local block at position 0"],
    );
    refused(request(two, &[&[1, 2], &[1, 0]], (0, 8), 8, Some(0)), invalid, &["group 1", "no block for local block 2"]);
    let range = ErrorKind::OutOfRange;
    refused(request(&[&[16], &[0]], one, (0, 4), 4, None), range, &["group 0", "local block 16", "16 blocks"]);
    refused(request(one, &[&[1], &[8]], (0, 4), 4, None), range, &["group 1", "remote block 8", "8 blocks"]);
    refused(copy_of(&plan, &[4, 2, 4], &[0, 1, 2]), invalid, &["group 0", "local block 4", "twice"]);
    let many = dense(300);
    let reversed: Vec<u32> = (0..300).rev().collect();
    let plan_of_many = self::plan(&many, &many).unwrap();
    assert_eq!(copy_of(&plan_of_many, &reversed, &reversed).unwrap().blocks(), 600);
    let repeated: Vec<u32> = reversed.iter().copied().chain([64]).collect();
    refused(copy_of(&plan_of_many, &repeated, &repeated), invalid, &["group 0", "local block 64", "twice"]);
    // The same remote block may be read twice.
    assert!(copy_of(&plan, &[4, 2], &[1, 1]).is_ok());
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    // Sub-blocks are counted in 32 bits.
    let large = |size, blocks| EngineSpec { layout: Layout::TokenMajor, block_size: vec![size], ..dense_spec(blocks) };
    let (l, r) = (only_rank(&large(8, u32::MAX), &two_groups()), only_rank(&large(4, 2), &two_groups()));
    let plan_of = plan(&l, &r).unwrap();
    let (local, remote) = (vec![blocks(&[u32::MAX - 1]); 2], vec![blocks(&[0, 1]); 2]);
    let tokens = (0, 8);
    let wanted =
        Wanted { local: &local, remote: &remote, tokens, remote_tokens: 8, null_block: None, window_only: true };
    refused(plan_of.request(&wanted), ErrorKind::OutOfRange, &["group 0", "times 2", "32 bits"]);
    // A block named twice is found among any number of blocks.
    let (local, remote) = (vec![blocks(&[u32::MAX / 2, 5, u32::MAX / 2]); 2], vec![blocks(&[0, 1, 0, 1, 0, 1]); 2]);
    let twice = Wanted { local: &local, remote: &remote, tokens: (0, 24), remote_tokens: 24, ..wanted };
    refused(plan_of.request(&twice), ErrorKind::InvalidArgument, &["group 0", "local block 2147483647", "twice"]);
    // Two block sizes that have nothing in common, in layouts that keep tokens apart.
    let odd = |size| EngineSpec { block_size: vec![size], ..dense_spec(2) };
    let (l, r) = (only_rank(&odd(2048), &two_groups()), only_rank(&odd(2047), &two_groups()));
    refused(plan(&l, &r), ErrorKind::Incompatible, &["more than 1048576 different runs", "one divides the other"]);
}

#[test]
fn groups_on_the_same_memory_must_not_write_a_block_twice() {
    let m = only_rank(&EngineSpec { parts: Parts::Packed, shared_groups: true, ..dense_spec(8) }, &two_groups());
    assert_eq!(m.agent.regions.len(), 2);
    let request = |plan: &RankPlan, a: &[u32], b: &[u32]| {
        let lists = [blocks(a), blocks(b)];
        let (local, remote) = (&lists, &lists);
        let (tokens, remote_tokens) = ((0, 8), 8);
        plan.request(&Wanted { local, remote, tokens, remote_tokens, null_block: None, window_only: true })
    };
    let shared = plan(&m, &m).unwrap();
    assert!(request(&shared, &[1, 2], &[4, 3]).is_ok());
    let text = ["local block 2", "groups 0 and 1", "twice"];
    refused(request(&shared, &[1, 2], &[4, 2]), ErrorKind::InvalidArgument, &text);
    // On separate memory the same ids are other blocks.
    let separate = dense(8);
    assert!(request(&plan(&separate, &separate).unwrap(), &[1, 2], &[4, 2]).is_ok());
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
        lists: vec![BlockPair { local: blocks(l), remote: blocks(r) }],
    };
    assert!(plan(segment, &[0, 3], &[0, 3]).check(by_index(&[64]), by_index(&[0, 104])).is_ok());
    refused(
        plan(segment, &[0, 4], &[0, 3]).check(by_index(&[64]), by_index(&[0, 104])),
        ErrorKind::OutOfRange,
        &["local block 4", "64 bytes"],
    );
    refused(
        plan(segment, &[0, 3], &[0, 4]).check(by_index(&[64]), by_index(&[0, 104])),
        ErrorKind::OutOfRange,
        &["remote block 4", "104 bytes"],
    );
    refused(
        plan(segment, &[0], &[0, 1]).check(by_index(&[64]), by_index(&[0, 104])),
        ErrorKind::InvalidArgument,
        &["1 local and 2 remote"],
    );
    refused(
        plan(segment, &[0], &[0]).check(by_index(&[64]), by_index(&[104])),
        ErrorKind::InvalidArgument,
        &["remote region 1", "which is none"],
    );
    refused(
        plan(Segment { list: 7, ..segment }, &[0], &[0]).check(by_index(&[64]), by_index(&[0, 104])),
        ErrorKind::InvalidArgument,
        &["block list 7"],
    );
    refused(
        plan(Segment { local_stride: u64::MAX, ..segment }, &[3], &[0]).check(by_index(&[64]), by_index(&[0, 104])),
        ErrorKind::OutOfRange,
        &["local block 3"],
    );
}

#[test]
fn a_broken_geometry_is_told_from_an_incompatible_one() {
    let good = dense(8);
    let mut bad = good.clone();
    bad.geometry.areas[3].offset = 1 << 40;
    let text = ["rank (pp 0, tp 0) of engine engine", "layers.1.attn"];
    refused(plan(&good, &bad), ErrorKind::OutOfRange, &text);
    refused(plan(&bad, &good), ErrorKind::OutOfRange, &["geometry of this rank (pp 0, tp 0)", "layers.1.attn"]);
    // Heads that are not there.
    let model = ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..1, 2, 8, 8)] };
    let ranks = EngineSpec { tp: 2, ..dense_spec(8) }.ranks(&model).unwrap();
    let whole = only_rank(&dense_spec(8), &model);
    let mut half = whole.clone();
    half.geometry = ranks[1].geometry.clone();
    let holding = [kvferry_proto::plan::Holding::new(whole.rank, &whole.geometry)];
    let cells = assign(whole.rank, &holding, &holding, 0).unwrap()[&whole.rank].cells.clone();
    let text = ["layers.0.attn", "holds heads 1 to 2", "the 2 from 0"];
    refused(RankPlan::new(&whole, &half, &cells), ErrorKind::Incompatible, &text);
}
