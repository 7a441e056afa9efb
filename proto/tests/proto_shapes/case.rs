//! A random model, two random engines for it, and a random request between them.

use kvferry_proto::geometry::GroupKind;
use kvferry_proto::shape::{EngineSpec, GroupSpec, Layout, ModelSpec, PartSpec, Parts};
use kvferry_proto::wire::Blocks;

use crate::choices::Choices;

/// One engine's block lists of one group: what the engine hands in, and which entry of the sequence's block table each
/// block is.
#[derive(Debug, Clone, Default)]
pub struct List {
    /// As handed in, with null blocks.
    pub ids: Vec<u32>,
    /// Entry and block.
    pub blocks: Vec<(u64, u32)>,
}

#[derive(Debug, Clone)]
pub struct Case {
    pub model: ModelSpec,
    pub producer: EngineSpec,
    pub consumer: EngineSpec,
    pub tokens: (u64, u64),
    pub remote_tokens: u64,
    pub null_block: Option<u32>,
    pub window_only: bool,
    pub local: Vec<List>,
    pub remote: Vec<List>,
    pub spread: u64,
    /// Bytes per operation for the second execution.
    pub max_op_bytes: u64,
}

pub fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Tokens that a block-list entry of a group stands for.
pub fn span(spec: &EngineSpec, group: usize) -> u64 {
    u64::from(spec.block_size_of(group).unwrap()) * u64::from(spec.dcp)
}

/// The first token of `end` that is still looked at, in a group with a window or chunks.
pub fn front(kind: GroupKind, end: u64) -> Option<u64> {
    match kind {
        GroupKind::SlidingWindow { window } => Some(end.saturating_sub(window.into())),
        GroupKind::Chunked { chunk } => Some((0..end.max(1)).rev().find(|t| t.is_multiple_of(chunk.into())).unwrap()),
        _ => None,
    }
}

fn divisors(of: u64) -> Vec<u64> {
    (1..=of).filter(|d| of.is_multiple_of(*d)).collect()
}

fn model(c: &mut Choices) -> ModelSpec {
    let layers = c.range(1, 4) as u32;
    let count = c.range(1, u64::from(layers).min(3)) as usize;
    let mut members: Vec<Vec<u32>> = vec![Vec::new(); count];
    for layer in 0..layers {
        let group = if (layer as usize) < count { layer as usize } else { c.below(count as u64) as usize };
        members[group].push(layer);
    }
    let mut groups = Vec::new();
    let mut states = false;
    for mut layers in members {
        groups.push(match c.below(5) {
            0 | 1 => {
                let kind = match c.below(6) {
                    0 => GroupKind::SlidingWindow { window: c.range(1, 16) as u32 },
                    1 => GroupKind::Chunked { chunk: c.range(1, 16) as u32 },
                    _ => GroupKind::Full,
                };
                let k = c.range(1, 8);
                let v = if c.once_in(4) { c.range(1, 8) } else { k };
                GroupSpec::attention(kind, layers, c.range(1, 8) as u32, k, v)
            }
            2 => GroupSpec::latent(layers, c.range(1, 8)),
            3 => {
                let k = c.range(1, 4);
                GroupSpec::attention(GroupKind::SlidingWindow { window: c.range(1, 9) as u32 }, layers, 2, k, k)
            }
            _ => {
                // A layer may have a state beside its attention.
                if !states && !layers.contains(&0) && c.once_in(3) {
                    layers.push(0);
                }
                states = true;
                let heads = c.range(1, 8) as u32;
                let part =
                    |name: &str, heads, positions, bytes| PartSpec { name: name.into(), heads, positions, bytes };
                let conv = part("conv", heads, c.range(1, 3) as u32, c.range(1, 3));
                let ssm = part("ssm", if c.once_in(2) { 1 } else { heads }, 1, c.range(1, 6));
                GroupSpec::state(layers, vec![conv, ssm])
            }
        });
    }
    ModelSpec { groups }
}

/// An element that every K can be cut into.
fn element(c: &mut Choices, model: &ModelSpec) -> u64 {
    let parts = model.groups.iter().flat_map(|group| &group.parts).filter(|part| part.name == "k");
    let all = parts.fold(0, |all, part| gcd(all, part.bytes)).max(1);
    c.one_of(&divisors(all))
}

fn engine(c: &mut Choices, model: &ModelSpec, element: u64) -> EngineSpec {
    let layers = model.groups.iter().flat_map(|group| &group.layers).max().unwrap() + 1;
    let tp = c.one_of(&[1, 2, 4, 3, 1, 2, 6]);
    let pp = if tp > 4 { 1 } else { c.range(1, u64::from(layers).min(if tp > 2 { 2 } else { 3 })) as u32 };
    let mut stages = vec![1; pp as usize];
    for _ in pp..layers {
        let stage = c.below(pp.into()) as usize;
        stages[stage] += 1;
    }
    let block_size: Vec<u32> = if c.once_in(2) {
        model.groups.iter().map(|_| c.range(1, 12) as u32).collect()
    } else {
        vec![c.one_of(&[4, 1, 2, 3, 6, 8, 9, 12])]
    };
    let common = block_size.iter().fold(0, |all, size| gcd(all, u64::from(*size)));
    let dcp = if c.once_in(2) { c.one_of(&divisors(tp)) } else { 1 };
    EngineSpec {
        tp: tp as u32,
        pp,
        stages: if c.once_in(4) { Vec::new() } else { stages },
        dcp: dcp as u32,
        dcp_interleave: c.one_of(&divisors(common)) as u32,
        pages: if c.once_in(3) { c.one_of(&divisors(common)) as u32 } else { 1 },
        block_size,
        layout: c.one_of(&[Layout::TokenMajor, Layout::HeadMajor, Layout::Turned { element }]),
        parts: c.one_of(&[Parts::InBlock, Parts::Packed, Parts::Regions]),
        layers_in_block: c.once_in(3),
        shared_groups: c.once_in(3),
        num_blocks: 1,
        lead: c.below(4),
        gap: if c.once_in(3) { c.range(1, 5) } else { 0 },
    }
}

/// The entries from `listed` to `end`, of which those before `real` are null blocks. Without a null block the list begins
/// with the first real one.
fn entries(listed: u64, real: u64, end: u64, null: Option<u32>) -> (Vec<bool>, u64) {
    let listed = if null.is_some() { listed.min(real) } else { real };
    ((listed..end).map(|entry| entry >= real).collect(), listed)
}

struct Draft {
    /// Which entries are blocks.
    real: Vec<bool>,
    first: u64,
}

fn draft(c: &mut Choices, case: &Case, group: usize, local: bool) -> Draft {
    let spec = if local { &case.consumer } else { &case.producer };
    let kind = case.model.groups[group].kind;
    if kind == GroupKind::State {
        let nulls = |c: &mut Choices| if case.null_block.is_some() { c.below(3) as usize } else { 0 };
        let mut real = vec![false; nulls(c)];
        real.extend(vec![true; c.range(1, 2) as usize]);
        if c.once_in(4) {
            real.extend(vec![false; nulls(c)]);
        }
        return Draft { real, first: 0 };
    }
    let span = span(spec, group);
    let (start, end) = if local { case.tokens } else { (0, case.remote_tokens) };
    let last = end.div_ceil(span);
    let (real, first) = match front(kind, end) {
        None => entries(start / span, start / span, last, None),
        Some(front) => {
            let needed = front / span;
            // Once in a while the producer has dropped too much, or the consumer has no room for all.
            let most = if c.once_in(8) { last } else { needed };
            let real = if c.once_in(2) { c.below(most + 1) } else { most };
            entries(c.below(real + 1), real, last, case.null_block)
        }
    };
    Draft { real, first }
}

/// Gives the entries blocks: in order, in reverse, or with some of them swapped.
fn place(c: &mut Choices, spec: &mut EngineSpec, null: Option<u32>, drafts: &[Draft]) -> Vec<List> {
    let lowest = u32::from(null == Some(0));
    let counts = drafts.iter().map(|draft| draft.real.iter().filter(|real| **real).count() as u32);
    let used = if spec.shared_groups { counts.sum::<u32>() } else { counts.max().unwrap_or(0) };
    spec.num_blocks = (lowest + used + c.below(3) as u32).max(1);
    let pool = |c: &mut Choices| {
        let mut pool: Vec<u32> = (lowest..spec.num_blocks).collect();
        match c.below(4) {
            0 => {}
            1 => pool.reverse(),
            _ => {
                for _ in 0..c.below(4) {
                    let (a, b) = (c.below(pool.len() as u64) as usize, c.below(pool.len() as u64) as usize);
                    if !pool.is_empty() {
                        pool.swap(a, b);
                    }
                }
            }
        }
        pool.into_iter()
    };
    let mut shared = pool(c);
    let mut lists = Vec::new();
    for draft in drafts {
        if !spec.shared_groups {
            shared = pool(c);
        }
        let mut list = List::default();
        for (entry, real) in (draft.first..).zip(&draft.real) {
            if *real {
                let id = shared.next().unwrap();
                list.ids.push(id);
                list.blocks.push((entry, id));
            } else {
                list.ids.push(null.unwrap());
            }
        }
        lists.push(list);
    }
    lists
}

impl Case {
    pub fn new(c: &mut Choices) -> Case {
        let model = model(c);
        let element = element(c, &model);
        let mut producer = engine(c, &model, element);
        let mut consumer = engine(c, &model, element);
        let mut grid = 1;
        if c.once_in(12) {
            // Blocks that only move whole: between equal blocks, from their first token on.
            for spec in [&mut producer, &mut consumer] {
                (spec.layout, spec.pages) = (Layout::Whole, 1);
            }
            consumer.block_size = producer.block_size.clone();
            if !consumer.tp.is_multiple_of(producer.dcp) {
                producer.dcp = 1;
            }
            (consumer.dcp, consumer.dcp_interleave) = (producer.dcp, producer.dcp_interleave);
            if (producer.parts == Parts::Packed) != (consumer.parts == Parts::Packed) {
                consumer.parts = producer.parts;
            }
            let tokens = (0..model.groups.len()).filter(|group| model.groups[*group].kind != GroupKind::State);
            grid = tokens.map(|group| span(&producer, group)).fold(1, |all, span| all / gcd(all, span) * span);
        }
        let end = c.range(1, 30);
        let start = if c.once_in(2) { c.below(end + 1) } else { 0 };
        let mut case = Case {
            model,
            producer,
            consumer,
            tokens: (start / grid * grid, end),
            remote_tokens: end + if c.once_in(3) { c.below(12) } else { 0 },
            null_block: c.one_of(&[Some(0), None]),
            window_only: c.once_in(2),
            local: Vec::new(),
            remote: Vec::new(),
            spread: c.below(7),
            max_op_bytes: c.range(1, 40),
        };
        let groups = 0..case.model.groups.len();
        let local: Vec<Draft> = groups.clone().map(|group| draft(c, &case, group, true)).collect();
        let remote: Vec<Draft> = groups.map(|group| draft(c, &case, group, false)).collect();
        let null = case.null_block;
        case.local = place(c, &mut case.consumer, null, &local);
        case.remote = place(c, &mut case.producer, null, &remote);
        case
    }

    /// The lists of one side as the engine hands them in.
    pub fn blocks(lists: &[List]) -> Vec<Blocks> {
        lists.iter().map(|list| list.ids.clone().into()).collect()
    }
}
