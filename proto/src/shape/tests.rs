#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::*;
use crate::geometry::Area;

fn llama(layers: u32, heads: u32) -> ModelSpec {
    ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..layers, heads, 8, 8)] }
}

fn heads(spec: &EngineSpec, model: &ModelSpec) -> Vec<(u32, u32)> {
    spec.ranks(model).unwrap().iter().map(|r| (r.geometry.areas[0].first_head, r.geometry.areas[0].heads)).collect()
}

fn area<'a>(rank: &'a RankCache, layer: &str, part: &str) -> &'a Area {
    rank.geometry.areas.iter().find(|a| a.layer == layer && a.part == part).unwrap()
}

#[test]
fn heads_are_dealt_over_ranks() {
    let tp = |tp| EngineSpec { tp, ..EngineSpec::default() };
    assert_eq!(heads(&tp(4), &llama(1, 8)), [(0, 2), (2, 2), (4, 2), (6, 2)]);
    assert_eq!(heads(&tp(4), &llama(1, 6)), [(0, 2), (2, 2), (4, 1), (5, 1)]);
    assert_eq!(heads(&tp(4), &llama(1, 2)), [(0, 1), (0, 1), (1, 1), (1, 1)]);
    assert_eq!(heads(&tp(4), &llama(1, 3)), [(0, 1), (0, 1), (1, 1), (2, 1)]);
    // With decode context parallelism two ranks each hold the same heads and alternate tokens.
    let dcp = EngineSpec { dcp: 2, dcp_interleave: 4, ..tp(4) };
    assert_eq!(heads(&dcp, &llama(1, 8)), [(0, 4), (0, 4), (4, 4), (4, 4)]);
    let ranks = dcp.ranks(&llama(1, 8)).unwrap();
    let tokens: Vec<_> = ranks.iter().map(|r| (r.geometry.groups[0].token_rank, r.geometry.groups[0].span())).collect();
    assert_eq!(tokens, [(0, 32), (1, 32), (0, 32), (1, 32)]);
}

#[test]
fn layers_are_split_over_stages() {
    let split =
        |pp, stages: &[u32], layers| EngineSpec { pp, stages: stages.to_vec(), ..EngineSpec::default() }.split(layers);
    assert_eq!(split(3, &[], 8).unwrap(), [3, 3, 2]);
    assert_eq!(split(4, &[], 5).unwrap(), [1, 1, 2, 1]);
    assert_eq!(split(2, &[1, 4], 5).unwrap(), [1, 4]);
    for bad in [split(2, &[1, 3], 5), split(2, &[5], 5), split(2, &[0, 5], 5), split(3, &[], 2), split(0, &[], 2)] {
        assert_eq!(bad.unwrap_err().kind(), ErrorKind::InvalidArgument);
    }
    let spec = EngineSpec { pp: 2, stages: vec![1, 2], ..EngineSpec::default() };
    let layers: Vec<Vec<String>> = spec
        .ranks(&llama(3, 1))
        .unwrap()
        .iter()
        .map(|r| r.geometry.areas.iter().filter(|a| a.part == "k").map(|a| a.layer.clone()).collect())
        .collect();
    assert_eq!(layers, [vec!["layers.0.attn"], vec!["layers.1.attn", "layers.2.attn"]]);
}

#[test]
fn layouts_put_every_byte_where_they_say() {
    let model = llama(2, 2);
    let with = |change: fn(&mut EngineSpec)| {
        let mut spec = EngineSpec { block_size: vec![4], num_blocks: 3, ..EngineSpec::default() };
        change(&mut spec);
        spec.ranks(&model).unwrap().remove(0)
    };
    // 2 heads x 4 tokens x 8 bytes: 64 a part.
    let plain = with(|_| ());
    assert_eq!(plain.region_lens, [3 * 128, 3 * 128]);
    let v = area(&plain, "layers.1.attn", "v");
    assert_eq!((v.region, v.offset, v.block_stride, v.head_stride, v.token_stride), (1, 64, 128, 8, 16));
    let packed = with(|s| (s.parts, s.layout, s.layers_in_block) = (Parts::Packed, Layout::HeadMajor, true));
    let kv = area(&packed, "layers.1.attn", "kv");
    assert_eq!((packed.region_lens.len(), kv.offset, kv.block_stride), (1, 128, 256));
    assert_eq!((kv.head_stride, kv.token_stride, kv.content), (64, 16, 16));
    let apart = with(|s| (s.parts, s.lead, s.gap, s.pages) = (Parts::Regions, 5, 3, 2));
    let v = area(&apart, "layers.1.attn", "v");
    assert_eq!(apart.region_lens, [5 + 3 * 67; 4]);
    assert_eq!((v.region, v.offset, v.block_stride), (3, 5, 67));
    assert_eq!((v.pages, v.page_stride, v.tokens), (2, 32, 2));
    let cpu = with(|s| s.layout = Layout::Turned { element: 2 });
    let (k, v) = (area(&cpu, "layers.0.attn", "k"), area(&cpu, "layers.0.attn", "v"));
    assert_eq!((k.offset, k.head_stride, k.token_stride), (0, 64, 2));
    assert_eq!((k.units, k.unit_stride, k.content), (4, 8, 2));
    assert_eq!((v.offset, v.head_stride, v.token_stride, v.units, v.content), (32, 64, 8, 1, 8));
    let whole = with(|s| s.layout = Layout::Whole);
    let k = area(&whole, "layers.0.attn", "k");
    assert_eq!((k.heads, k.head_stride, k.tokens, k.content), (2, 32, 1, 32));
}

#[test]
fn groups_may_share_regions_and_states_are_cut_by_rank() {
    let state = vec![
        PartSpec { name: "conv".into(), heads: 6, positions: 3, bytes: 2 },
        PartSpec { name: "ssm".into(), heads: 1, positions: 1, bytes: 40 },
    ];
    let model = ModelSpec {
        groups: vec![
            GroupSpec::attention(GroupKind::Full, [0, 2], 2, 8, 8),
            GroupSpec::state([1, 3], state),
            GroupSpec::latent([4], 12),
        ],
    };
    let spec = EngineSpec { tp: 2, shared_groups: true, block_size: vec![4, 1, 2], ..EngineSpec::default() };
    let ranks = spec.ranks(&model).unwrap();
    // K and V of one head: 64 bytes; the state: 18 + 40.
    assert_eq!(ranks[1].region_lens, [1024 * 64, 1024 * 64]);
    let conv = area(&ranks[1], "layers.3.state", "conv");
    assert_eq!((conv.region, conv.block_stride, conv.first_head, conv.heads, conv.total_heads), (1, 64, 3, 3, 6));
    assert_eq!((conv.head_stride, conv.token_stride, conv.tokens), (2, 6, 3));
    let ssm = area(&ranks[1], "layers.3.state", "ssm");
    assert_eq!((ssm.offset, ssm.heads, ssm.first_head), (18, 1, 0));
    assert_eq!(area(&ranks[0], "layers.4.attn", "latent").region, 0);
    assert_eq!(ranks[0].geometry.groups[1].block_size, 1);
}

#[test]
fn a_part_may_have_as_many_heads_as_an_axis_is_long() {
    let part = PartSpec { name: "ssm".into(), heads: MAX_AXIS, positions: 1, bytes: 1 };
    let model = ModelSpec { groups: vec![GroupSpec::state([0], vec![part])] };
    let spec = EngineSpec { num_blocks: 1, block_size: vec![1], ..EngineSpec::default() };
    let ranks = spec.ranks(&model).unwrap();
    assert_eq!(area(&ranks[0], "layers.0.state", "ssm").heads, MAX_AXIS);
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let refused = |change: &dyn Fn(&mut EngineSpec, &mut ModelSpec), parts: &[&str]| {
        let (mut spec, mut model) = (EngineSpec::default(), llama(2, 2));
        change(&mut spec, &mut model);
        let error = spec.ranks(&model).unwrap_err();
        for part in parts {
            assert!(error.message().contains(part), "{error:?} does not say {part:?}");
        }
    };
    refused(&|s, _| s.tp = 0, &["tensor-parallel size is 0"]);
    refused(&|s, _| s.tp = u32::MAX, &["ranks"]);
    refused(&|s, _| (s.tp, s.dcp) = (4, 3), &["size 3", "size 4"]);
    refused(&|s, _| (s.tp, s.dcp, s.dcp_interleave) = (4, 2, 3), &["3 consecutive tokens"]);
    refused(&|s, _| s.pp = 3, &["2 layers", "3 pipeline stages"]);
    refused(&|s, _| s.pages = 0, &["0 physical blocks"]);
    refused(&|s, _| s.pages = 3, &["16 tokens", "3 physical"]);
    refused(&|s, _| (s.pages, s.layout) = (2, Layout::Whole), &["2 physical", "order of the engine's own"]);
    refused(&|s, _| s.block_size = vec![], &["0 block sizes"]);
    refused(&|s, _| s.block_size = vec![4, 4], &["2 block sizes", "1 KV-cache groups"]);
    refused(&|s, _| s.block_size = vec![0], &["0 tokens"]);
    refused(&|s, _| s.num_blocks = 0, &["num_blocks 0"]);
    refused(&|s, _| s.layout = Layout::Turned { element: 3 }, &["8 bytes", "3 bytes"]);
    refused(&|s, _| s.layout = Layout::Turned { element: 0 }, &["0 bytes"]);
    refused(&|s, _| s.lead = u64::MAX, &["beyond 64 bits"]);
    refused(&|s, _| s.gap = u64::MAX, &["beyond 64 bits"]);
    refused(&|_, m| m.groups[0].parts[0].bytes = u64::MAX, &[]);
    refused(&|_, m| m.groups[0].parts[0].bytes = 0, &["part \"k\"", "0 bytes"]);
    refused(&|_, m| m.groups[0].parts[0].heads = MAX_AXIS + 1, &["1048577 heads", "at most 1048576 heads"]);
    refused(&|_, m| m.groups[0].parts[0].positions = 2, &["2 positions"]);
    refused(&|_, m| m.groups[0].parts[1].heads = 1, &["different numbers of heads"]);
    refused(&|_, m| m.groups[0].parts.clear(), &["no parts"]);
    refused(&|_, m| m.groups[0].layers.push(1), &["layer 1"]);
    refused(&|_, m| m.groups[0].layers.push(u32::MAX), &["layer 4294967295"]);
    refused(&|_, m| m.groups.clear(), &["0 layers"]);
}
