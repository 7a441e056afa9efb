#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::*;
use crate::proto::shape::{GroupSpec, Layout, Parts};
use crate::proto::wire::CompatField;

fn model(heads: u32) -> ModelSpec {
    ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..4, heads, 32, 32)] }
}

/// An engine as vLLM names its layers, K and V packed.
fn engine(spec: &EngineSpec, model: &ModelSpec) -> Vec<RankMetadata> {
    let id = EngineId::new("prefill").unwrap();
    let caches = spec.ranks(model).unwrap();
    let mut ranks: Vec<RankMetadata> = caches.iter().map(|cache| cache.metadata(&id, spec.shape())).collect();
    for rank in &mut ranks {
        rank.compat = vec![CompatField { name: "model".into(), value: "tiny".into(), informative: false }];
        for area in &mut rank.geometry.areas {
            area.layer = format!("model.{}.self_attn", area.layer);
        }
    }
    ranks
}

fn own(spec: EngineSpec, model: ModelSpec) -> OwnSide {
    OwnSide { model, engine: spec, compat: BTreeMap::new() }
}

fn wrong(survey: &Survey) -> Vec<&str> {
    survey.fields.iter().filter(|field| field.fits == Some(false)).map(|field| &*field.name).collect()
}

fn survey(ranks: &[RankMetadata], own: Option<&OwnSide>) -> Survey {
    Survey::of(Incarnation(0xab), ranks, VERSION, own).unwrap()
}

#[test]
fn an_engine_is_described_without_another() {
    let spec = EngineSpec { tp: 2, pp: 2, parts: Parts::Packed, layout: Layout::HeadMajor, ..EngineSpec::default() };
    let found = survey(&engine(&spec, &model(8)), None);
    assert_eq!((found.ranks.len(), &*found.incarnation), (4, "00000000000000ab"));
    assert_eq!((&found.ranks[0].layers, &found.ranks[0].heads), (&vec![(0, 1)], &vec![(0, 3)]));
    let value = |name: &str| found.fields.iter().find(|field| field.name == name).unwrap().there.clone();
    assert_eq!(value("layers"), "4 (0-3)");
    assert_eq!(value("kinds of cache"), "full");
    assert_eq!(value("KV heads of the model"), "8");
    assert_eq!(value("bytes per token and head"), "k+v 64");
    assert_eq!(value("order in a block"), "head-major");
    assert_eq!(value("model"), "tiny");
    assert!(found.fields.iter().all(|field| field.fits.is_none()));
}

#[test]
fn other_sizes_and_layouts_fit() {
    let spec = EngineSpec { tp: 4, parts: Parts::Packed, ..EngineSpec::default() };
    let other = EngineSpec { tp: 1, pp: 2, block_size: vec![64], layout: Layout::HeadMajor, ..EngineSpec::default() };
    let found = survey(&engine(&spec, &model(8)), Some(&own(other, model(8))));
    assert_eq!(wrong(&found), [] as [&str; 0]);
}

#[test]
fn what_differs_is_named_and_the_handshake_would_refuse_it_too() {
    let ranks = engine(&EngineSpec::default(), &model(8));
    let check = "check of every pair of ranks";
    let found = survey(&ranks, Some(&own(EngineSpec::default(), model(4))));
    assert_eq!(wrong(&found), ["KV heads of the model", check]);
    let wider = ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..4, 8, 64, 64)] };
    assert_eq!(wrong(&survey(&ranks, Some(&own(EngineSpec::default(), wider)))), ["bytes per token and head", check]);
    let window = GroupKind::SlidingWindow { window: 8 };
    let window = ModelSpec { groups: vec![GroupSpec::attention(window, 0..4, 8, 32, 32)] };
    assert_eq!(wrong(&survey(&ranks, Some(&own(EngineSpec::default(), window)))), ["kinds of cache", check]);
    // The ranks that both have fit each other; that there are more is a difference all the same.
    let deeper = ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..5, 8, 32, 32)] };
    assert_eq!(wrong(&survey(&ranks, Some(&own(EngineSpec::default(), deeper)))), ["layers"]);
}

#[test]
fn block_sizes_must_match_where_blocks_move_whole() {
    let whole = EngineSpec { layout: Layout::Whole, ..EngineSpec::default() };
    let ranks = engine(&whole, &model(8));
    let other = EngineSpec { block_size: vec![32], ..whole.clone() };
    let found = survey(&ranks, Some(&own(other, model(8))));
    assert!(wrong(&found).contains(&"tokens per block"), "{:?}", wrong(&found));
    assert_eq!(wrong(&survey(&ranks, Some(&own(whole, model(8))))), [] as [&str; 0]);
}

#[test]
fn compatibility_fields_are_compared_where_they_are_given() {
    let ranks = engine(&EngineSpec::default(), &model(8));
    let mut side = own(EngineSpec::default(), model(8));
    side.compat = BTreeMap::from([("model".into(), "tiny".into())]);
    assert_eq!(wrong(&survey(&ranks, Some(&side))), [] as [&str; 0]);
    side.compat = BTreeMap::from([("model".into(), "large".into()), ("dtype".into(), "float16".into())]);
    let found = survey(&ranks, Some(&side));
    assert_eq!(wrong(&found), ["model", "dtype"]);
    let model = found.fields.iter().find(|field| field.name == "model").unwrap();
    assert_eq!((model.here.as_deref(), &*model.there), (Some("large"), "tiny"));
    assert_eq!(model.remedy, "start both engines with the same model");
    // The last field counts the ranks that were compared.
    let pairs = found.fields.last().unwrap();
    assert_eq!((pairs.here.as_deref(), &*pairs.there), (Some("1 rank"), "1 rank"));
}

#[test]
fn names_without_one_number_are_counted() {
    let mut ranks = engine(&EngineSpec::default(), &model(8));
    for area in &mut ranks[0].geometry.areas {
        area.layer = area.layer.replace("layers.", "stage.7.");
    }
    assert_eq!(wrong(&survey(&ranks, Some(&own(EngineSpec::default(), model(8))))), [] as [&str; 0]);
}

#[test]
fn ranks_of_another_engine_or_too_few_are_refused() {
    let spec = EngineSpec { tp: 2, ..EngineSpec::default() };
    let ranks = engine(&spec, &model(8));
    let blobs: Vec<RankBlob> =
        ranks.iter().map(|rank| RankBlob { rank: rank.rank, metadata: rank.to_bytes().unwrap().into() }).collect();
    let id = EngineId::new("prefill").unwrap();
    let (decoded, protocol) = decode_ranks(&id, spec.shape(), &blobs).unwrap();
    assert_eq!((decoded, protocol), (ranks, VERSION));
    let fewer = decode_ranks(&id, spec.shape(), &blobs[..1]).unwrap_err();
    assert!(fewer.message().contains("gave 1"), "{fewer}");
    let other = decode_ranks(&EngineId::new("decode").unwrap(), spec.shape(), &blobs).unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Incompatible);
}
