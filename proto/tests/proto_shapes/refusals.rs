//! Engines that cannot exchange caches are told what differs, both values, and what to do.

use kvferry_proto::geometry::GroupKind;
use kvferry_proto::plan::{RankPlan, assign, check_ranks};
use kvferry_proto::shape::{EngineSpec, GroupSpec, Layout, ModelSpec, PartSpec, Parts};
use kvferry_proto::{Error, ErrorKind, Result};

use crate::Engine;

const REMEDY: &str = "start both engines with the same model";

fn attention(kind: GroupKind, heads: u32, bytes: u64) -> ModelSpec {
    ModelSpec { groups: vec![GroupSpec::attention(kind, 0..3, heads, bytes, bytes)] }
}

fn tp(tp: u32) -> EngineSpec {
    EngineSpec { tp, block_size: vec![4], num_blocks: 4, ..EngineSpec::default() }
}

/// All plans of all ranks of the consumer.
fn plan(consumer: &Engine, producer: &Engine) -> Result<()> {
    for rank in &consumer.ranks {
        for (other, share) in assign(rank.rank, &consumer.holdings, &producer.holdings, 0)? {
            RankPlan::new(&consumer.metadata[&rank.rank], &producer.metadata[&other], &share.cells)?;
        }
    }
    Ok(())
}

/// What the handshake compares.
fn compare(consumer: &Engine, producer: &Engine) -> Result<()> {
    let mut pairs =
        consumer.metadata.values().flat_map(|own| producer.metadata.values().map(move |other| (own, other)));
    pairs.try_for_each(|(own, other)| check_ranks(own, other))
}

fn says(error: &Error, parts: &[&str]) {
    assert_eq!(error.kind(), ErrorKind::Incompatible, "{error}");
    for part in parts {
        assert!(error.message().contains(part), "{error} does not say {part:?}");
    }
}

/// The handshake's comparison refuses in these words, and there is no plan either.
fn refused(consumer: (&EngineSpec, &ModelSpec), producer: (&EngineSpec, &ModelSpec), parts: &[&str]) {
    let (d, p) = (Engine::new(consumer.0, consumer.1), Engine::new(producer.0, producer.1));
    says(&compare(&d, &p).unwrap_err(), parts);
    says(&plan(&d, &p).unwrap_err(), &[]);
}

/// As [`refused`], with sides swapped too. `a` and `b` are the two values as the message has them.
fn refused_both_ways(
    one: (&EngineSpec, &ModelSpec),
    two: (&EngineSpec, &ModelSpec),
    field: &str,
    a: &str,
    b: &str,
    remedy: &str,
) {
    refused(one, two, &[field, &format!("{a} here"), &format!("{b} on the other side"), remedy]);
    refused(two, one, &[field, &format!("{b} here"), &format!("{a} on the other side"), remedy]);
}

#[test]
fn bytes_heads_and_kinds() {
    let full = attention(GroupKind::Full, 4, 8);
    let field = "bytes per token and head of layer \"layers.0.attn\" part \"k\"";
    for (d, p) in [(1, 1), (2, 3), (4, 1)] {
        refused_both_ways((&tp(d), &full), (&tp(p), &attention(GroupKind::Full, 4, 16)), field, "8", "16", REMEDY);
        let heads = "number of KV heads of the model of layer \"layers.0.attn\" part \"k\"";
        refused_both_ways((&tp(d), &full), (&tp(p), &attention(GroupKind::Full, 8, 8)), heads, "4", "8", REMEDY);
        let kind = "kind of cache of layer \"layers.0.attn\" part \"k\"";
        let window = attention(GroupKind::SlidingWindow { window: 9 }, 4, 8);
        let nine = "sliding window of 9 tokens";
        refused_both_ways((&tp(d), &full), (&tp(p), &window), kind, "full", nine, REMEDY);
        let other = attention(GroupKind::SlidingWindow { window: 7 }, 4, 8);
        refused_both_ways((&tp(d), &other), (&tp(p), &window), kind, "sliding window of 7 tokens", nine, REMEDY);
        let latent = ModelSpec { groups: vec![GroupSpec::latent(0..3, 8)] };
        let layout = "layout of layer \"layers.0.attn\"";
        refused_both_ways((&tp(d), &full), (&tp(p), &latent), layout, "k+v", "latent", REMEDY);
    }
}

#[test]
fn bytes_where_one_side_packs_k_and_v() {
    let packed = EngineSpec { parts: Parts::Packed, ..tp(1) };
    let (small, large) = (attention(GroupKind::Full, 2, 8), attention(GroupKind::Full, 2, 12));
    let field = "bytes per token and head of layer \"layers.0.attn\"";
    refused_both_ways((&packed, &small), (&tp(1), &large), field, "16", "24", REMEDY);
    refused_both_ways((&packed, &large), (&tp(1), &small), field, "24", "16", REMEDY);
    refused_both_ways((&packed, &large), (&packed, &small), field, "24", "16", REMEDY);
}

#[test]
fn sets_of_layers() {
    let (three, two) = (attention(GroupKind::Full, 2, 8), {
        let mut model = attention(GroupKind::Full, 2, 8);
        model.groups[0].layers.pop();
        model
    });
    for (d, p) in [(1, 1), (2, 1), (1, 3)] {
        let (long, short) = (Engine::new(&tp(d), &three), Engine::new(&tp(p), &two));
        let field = "set of layers differs: ";
        let remedy = "start both engines with the same model";
        let longer = "3 layers, among them layer \"layers.2.attn\" part \"k\" alone";
        let error = plan(&long, &short).unwrap_err();
        says(&error, &[&format!("{field}{longer} here, 2 layers on the other side"), remedy]);
        let error = plan(&short, &long).unwrap_err();
        says(&error, &[&format!("{field}2 layers here, {longer} on the other side"), remedy]);
    }
}

#[test]
fn states() {
    let state = |heads, positions, bytes| {
        let part = PartSpec { name: "conv".into(), heads, positions, bytes };
        ModelSpec { groups: vec![GroupSpec::state(0..2, vec![part])] }
    };
    let own = state(4, 3, 8);
    let of = "of layer \"layers.0.state\" part \"conv\"";
    let pair = |other: &ModelSpec, field: &str, a: &str, b: &str| {
        refused_both_ways((&tp(2), &own), (&tp(1), other), &format!("{field} {of}"), a, b, REMEDY);
    };
    pair(&state(4, 2, 8), "positions per block", "3", "2");
    pair(&state(8, 3, 8), "number of KV heads of the model", "4", "8");
    pair(&state(4, 3, 4), "bytes per token and head", "8", "4");
}

#[test]
fn blocks_and_tokens_in_an_order_of_the_engines_own() {
    let model = attention(GroupKind::Full, 4, 8);
    let whole = EngineSpec { layout: Layout::Whole, ..tp(2) };
    let with = |change: &dyn Fn(&mut EngineSpec)| {
        let mut spec = whole.clone();
        change(&mut spec);
        spec
    };
    let pair = |a: &EngineSpec, b: &EngineSpec, field: &str, x: &str, y: &str, remedy: &str| {
        refused_both_ways((a, &model), (b, &model), field, x, y, remedy);
    };
    pair(&whole, &with(&|s| s.block_size = vec![8]), "block size of layer", "4", "8", "the same block size");
    pair(&whole, &tp(2), "positions per block of layer", "1", "4", "attention backend");
    pair(
        &with(&|s| s.dcp = 2),
        &with(&|s| (s.dcp, s.dcp_interleave) = (2, 4)),
        "consecutive tokens per rank of layer",
        "1",
        "4",
        "start both engines",
    );
    pair(&with(&|s| s.parts = Parts::Packed), &whole, "layout of layer", "kv", "k+v", "attention backend");
    let turned = |element| EngineSpec { layout: Layout::Turned { element }, ..tp(1) };
    pair(&turned(2), &turned(4), "runs per token of layer", "4 of 2 bytes", "2 of 4 bytes", "attention backend");
}

#[test]
fn ranks_that_are_missing() {
    let model = attention(GroupKind::Full, 4, 8);
    let consumer = Engine::new(&tp(1), &model);
    let mut producer = Engine::new(&tp(2), &model);
    producer.holdings.pop();
    let error = plan(&consumer, &producer).unwrap_err();
    says(&error, &["layers.0.attn", "heads 2 to 3", "all of the other engine's ranks must hand in their metadata"]);
    let dealt = EngineSpec { dcp: 2, ..tp(2) };
    let mut producer = Engine::new(&dealt, &model);
    producer.holdings.pop();
    says(&plan(&consumer, &producer).unwrap_err(), &["layers.0.attn", "heads 0 to 3", "tokens of rank 1"]);
    // A consumer rank that is not one of its engine's.
    let alone = assign(kvferry_proto::RankId { pp: 3, tp: 0 }, &consumer.holdings, &producer.holdings, 0);
    assert_eq!(alone.unwrap_err().kind(), ErrorKind::NotFound);
}
