#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::ErrorKind;
use crate::wire::MemoryKind;

fn regions(lens: &[u64]) -> Vec<RegionMetadata> {
    lens.iter()
        .map(|&len| RegionMetadata {
            base: 4096,
            len,
            kind: MemoryKind::Host,
            rkey: vec![],
            handle: None,
            is_scattered: false,
            is_filled_by_kernel: false,
        })
        .collect()
}

/// Blocks of 4 heads by 2 tokens by 8 bytes, dense: 64 bytes.
fn area(layer: &str, part: &str, offset: u64) -> Area {
    Area {
        layer: layer.into(),
        part: part.into(),
        group: 0,
        region: 0,
        offset,
        num_blocks: 4,
        block_stride: 64,
        heads: 4,
        first_head: 0,
        total_heads: 4,
        head_stride: 16,
        tokens: 2,
        token_stride: 8,
        content: 8,
        ..Area::default()
    }
}

fn geometry(areas: Vec<Area>) -> Geometry {
    let group = Group::new(GroupKind::Full, 2);
    Geometry { groups: vec![group.clone(), group], areas }
}

fn refused(areas: Vec<Area>, kind: ErrorKind, parts: &[&str]) {
    refused_geometry(&geometry(areas), kind, parts);
}

fn refused_geometry(geometry: &Geometry, kind: ErrorKind, parts: &[&str]) {
    let error = geometry.validate(&regions(&[1024])).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for part in parts {
        assert!(error.message().contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn bounds_are_checked_field_by_field() {
    geometry(vec![area("a", "k", 0), area("a", "v", 256)]).validate(&regions(&[512])).unwrap();
    assert_eq!(area("a", "k", 3).end(), Some(3 + 256));
    let with = |change: fn(&mut Area)| {
        let mut a = area("a", "k", 0);
        change(&mut a);
        vec![a]
    };
    let invalid = ErrorKind::InvalidArgument;
    refused(with(|a| a.region = 1), invalid, &["layer \"a\" part \"k\"", "region 1", "exports 1"]);
    refused(with(|a| a.group = 2), invalid, &["group 2"]);
    refused(with(|a| a.layer.clear()), invalid, &["layer name"]);
    refused(with(|a| a.layer = "x".repeat(257)), invalid, &["257"]);
    refused(with(|a| a.part.clear()), invalid, &["part name"]);
    refused(with(|a| a.num_blocks = 0), invalid, &["num_blocks 0"]);
    refused(with(|a| a.heads = 0), invalid, &["heads 0"]);
    refused(with(|a| a.tokens = 0), invalid, &["tokens 0"]);
    refused(with(|a| a.content = 0), invalid, &["content 0"]);
    refused(with(|a| a.block_stride = 0), invalid, &["block_stride 0"]);
    refused(with(|a| a.head_stride = 0), invalid, &["head_stride 0"]);
    refused(with(|a| a.token_stride = 0), invalid, &["token_stride 0"]);
    refused(with(|a| a.first_head = 1), invalid, &["4 heads from head 1", "has 4"]);
    refused(with(|a| a.first_head = u32::MAX), invalid, &["from head 4294967295"]);
    refused(with(|a| a.total_heads = MAX_AXIS + 1), ErrorKind::Exhausted, &["heads", "1048576"]);
    refused(with(|a| a.offset = 1024 - 255), ErrorKind::OutOfRange, &["at byte 1025", "1024 bytes"]);
    refused(with(|a| a.offset = u64::MAX - 3), ErrorKind::OutOfRange, &["beyond 64 bits"]);
    refused(with(|a| a.num_blocks = u32::MAX), ErrorKind::OutOfRange, &["4294967295 blocks"]);
    refused(with(|a| a.block_stride = 63), invalid, &["64 contiguous bytes", "block stride 63"]);
    refused(vec![area("a", "k", 0), area("a", "k", 256)], ErrorKind::AlreadyExists, &["twice"]);
    // One head's stride is never used.
    let mut single = area("a", "k", 0);
    (single.heads, single.total_heads, single.head_stride) = (1, 1, 0);
    geometry(vec![single]).validate(&regions(&[1024])).unwrap();
}

#[test]
fn groups_and_counts_are_checked() {
    let with = |group: Group| Geometry { groups: vec![group], areas: vec![] };
    let invalid = ErrorKind::InvalidArgument;
    refused_geometry(&with(Group::new(GroupKind::Full, 0)), invalid, &["block size 0"]);
    refused_geometry(&with(Group::new(GroupKind::State, 2)), invalid, &["state", "block size 2"]);
    let window = GroupKind::SlidingWindow { window: 0 };
    refused_geometry(&with(Group::new(window, 2)), invalid, &["sliding window of 0"]);
    let group = Group::new(GroupKind::Full, 2);
    let many = Geometry { groups: vec![group; MAX_GROUPS + 1], areas: vec![] };
    refused_geometry(&many, ErrorKind::Exhausted, &["257 KV-cache groups", "256"]);
    refused(vec![area("a", "k", 0); MAX_AREAS + 1], ErrorKind::Exhausted, &["16385 areas"]);
    // A geometry that would take 2^40 runs is refused before any is made.
    let mut crumbs = area("a", "k", 0);
    (crumbs.heads, crumbs.total_heads, crumbs.head_stride) = (1 << 20, 1 << 20, 1 << 21);
    (crumbs.tokens, crumbs.token_stride, crumbs.content) = (1 << 20, 2, 1);
    (crumbs.num_blocks, crumbs.block_stride) = (1, 1 << 41);
    let groups = vec![Group::new(GroupKind::Full, 1 << 20)];
    let error = Geometry { groups, areas: vec![crumbs] }.validate(&regions(&[1 << 42])).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Exhausted, "{error}");
    let shared = |ranks, rank, interleave| Group {
        token_ranks: ranks,
        token_rank: rank,
        token_interleave: interleave,
        ..Group::new(GroupKind::Full, 6)
    };
    with(shared(3, 2, 2)).validate(&[]).unwrap();
    with(shared(MAX_AXIS, MAX_AXIS - 1, 1)).validate(&[]).unwrap();
    refused_geometry(&with(shared(MAX_AXIS + 1, 0, 1)), invalid, &["over 1048577 ranks"]);
    refused_geometry(&with(shared(0, 0, 1)), invalid, &["over 0 ranks"]);
    refused_geometry(&with(shared(3, 3, 1)), invalid, &["over 3 ranks", "number 3"]);
    refused_geometry(&with(shared(3, 0, 4)), invalid, &["4 consecutive tokens", "block size, 6"]);
    refused_geometry(&with(shared(3, 0, 0)), invalid, &["0 consecutive tokens"]);
    let state = Group { token_ranks: 2, ..Group::new(GroupKind::State, 1) };
    refused_geometry(&with(state), invalid, &["holds a state", "2 ranks"]);
    let mut odd = area("a", "k", 0);
    odd.pages = 2;
    odd.page_stride = 8;
    refused(vec![odd], invalid, &["2 pages of 2 tokens", "blocks of 2 tokens"]);
}

#[test]
fn interleaved_areas_are_told_from_overlapping_ones() {
    let exists = ErrorKind::AlreadyExists;
    // K and V side by side in each token, and layers side by side in each block.
    let interleaved = |layer: &str, part: &str, offset: u64| {
        let mut a = area(layer, part, offset);
        (a.token_stride, a.head_stride, a.block_stride) = (16, 32, 256);
        a
    };
    let mut all = vec![
        interleaved("a", "k", 0),
        interleaved("a", "v", 8),
        interleaved("b", "k", 128),
        interleaved("b", "v", 136),
    ];
    geometry(all.clone()).validate(&regions(&[1024])).unwrap();
    all[3].offset = 135;
    let error = geometry(all).validate(&regions(&[1024])).unwrap_err();
    assert!(error.kind() == exists && error.message().contains("share bytes"), "{error}");
    // The same block stride, shifted by whole blocks: only the rows tell.
    geometry(vec![area("a", "k", 0), area("b", "k", 256)]).validate(&regions(&[512])).unwrap();
    refused(vec![area("a", "k", 0), area("b", "k", 192)], exists, &["\"a\"", "\"b\"", "group 0"]);
    // Heads outside blocks: each block is scattered over the region.
    let mut outside = area("a", "k", 0);
    (outside.head_stride, outside.block_stride) = (64, 16);
    geometry(vec![outside.clone()]).validate(&regions(&[256])).unwrap();
    outside.head_stride = 48;
    refused(vec![outside], exists, &["on itself"]);
    // Other block strides in the same place cannot be told apart.
    let mut wider = area("b", "k", 64);
    wider.block_stride = 128;
    refused(vec![area("a", "k", 0), wider.clone()], exists, &["block strides 64 and 128"]);
    wider.offset = 256;
    geometry(vec![area("a", "k", 0), wider]).validate(&regions(&[1024])).unwrap();
}

#[test]
fn groups_share_memory_block_by_block_only() {
    let second = |offset: u64| {
        let mut b = area("b", "k", offset);
        b.group = 1;
        b
    };
    let shared = geometry(vec![area("a", "k", 0), second(0)]).shared_groups(&regions(&[1024])).unwrap();
    assert_eq!(shared, [(0, 1)]);
    let apart = geometry(vec![area("a", "k", 0), second(256)]).shared_groups(&regions(&[1024])).unwrap();
    assert_eq!(apart, []);
    refused(
        vec![area("a", "k", 0), second(64)],
        ErrorKind::AlreadyExists,
        &["group 0", "group 1", "different block ids"],
    );
    refused(vec![area("a", "k", 0), second(8)], ErrorKind::AlreadyExists, &["different block ids"]);
}

/// An area's index and group, and a block of it.
type Place = (usize, u32, u32);

/// True if no byte has two places, but of one block id in two groups: by listing the places of each byte.
fn brute_force(geometry: &Geometry) -> bool {
    let mut owner: HashMap<(u32, u64), Vec<Place>> = HashMap::new();
    for (index, a) in geometry.areas.iter().enumerate() {
        for b in 0..a.num_blocks {
            for h in 0..a.heads {
                for t in 0..a.tokens {
                    for c in 0..a.content {
                        let at = a.offset
                            + u64::from(b) * a.block_stride
                            + u64::from(h) * a.head_stride
                            + u64::from(t) * a.token_stride
                            + c;
                        owner.entry((a.region, at)).or_default().push((index, a.group, b));
                    }
                }
            }
        }
    }
    owner.values().all(|here| {
        here.iter().enumerate().all(|(i, x)| here.iter().skip(i + 1).all(|y| x.0 != y.0 && x.1 != y.1 && x.2 == y.2))
    })
}

fn small_areas() -> impl Strategy<Value = Vec<Area>> {
    let one = (0u64..40, 1u32..4, 1u32..3, 1u32..3, 1u64..3, 0u32..2, (1u64..14, 1u64..14));
    (prop::collection::vec(one, 1..4), 1u64..24).prop_map(|(all, block_stride)| {
        let make = |(i, (offset, num_blocks, heads, tokens, content, group, (hs, ts)))| {
            let mut a: Area = area(&format!("{i}"), "k", offset);
            (a.num_blocks, a.block_stride, a.heads, a.total_heads, a.head_stride) =
                (num_blocks, block_stride, heads, heads, hs);
            (a.tokens, a.token_stride, a.content, a.group) = (tokens, ts, content, group);
            a
        };
        all.into_iter().enumerate().map(make).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

    #[test]
    fn overlap_is_found_exactly(areas in small_areas()) {
        // A run longer than the block stride is refused before overlap is looked at.
        prop_assume!(areas.iter().all(|a| bounds::folded(a.content, a.axes()).0 <= a.block_stride));
        let geometry = geometry(areas);
        let found = overlap::check(&geometry);
        prop_assert_eq!(found.is_ok(), brute_force(&geometry), "{:?}", found);
    }
}

#[test]
fn keys_and_values_packed_and_apart_are_refused_in_either_order() {
    for (first, second) in [("kv", "v"), ("v", "kv"), ("k", "kv")] {
        refused(vec![area("a", first, 0), area("a", second, 256)], ErrorKind::AlreadyExists, &["beside part", "once"]);
    }
    geometry(vec![area("a", "kv", 0), area("b", "v", 256)]).validate(&regions(&[512])).unwrap();
}
