//! What a request has to copy, byte by byte, from the definition of an address map alone.

use std::collections::BTreeSet;

use kvferry_proto::geometry::{Area, GroupKind};
use kvferry_proto::shape::{ModelSpec, RankCache};

use crate::case::{Case, List, front, gcd, span};

/// What a byte of a cache is: the same number on every rank of every engine of the model.
pub type Identity = u64;

/// Where a byte lies on one rank, and what it is.
pub struct Place {
    pub region: usize,
    pub offset: usize,
    pub group: usize,
    /// The token, counted from the start of the sequence. In a block that only moves whole, its first one.
    pub token: u64,
    pub identity: Identity,
}

/// What is the same for all bytes of an area.
struct Name {
    group: u64,
    layer: u64,
    part: u64,
    /// Bytes of K, where the area packs K and V of tokens.
    packed: Option<u64>,
}

impl Name {
    fn new(model: &ModelSpec, area: &Area, whole: bool) -> Name {
        let group = &model.groups[area.group as usize];
        let layer = group.layers.iter().position(|&number| group.layer_name(number) == area.layer).unwrap() as u64;
        let packs = area.part == "kv";
        let part = if packs { 7 } else { group.parts.iter().position(|part| part.name == area.part).unwrap() as u64 };
        Name { group: area.group.into(), layer, part, packed: (packs && !whole).then_some(group.parts[0].bytes) }
    }

    /// A part's bytes of a token are numbered through; packed K and V are those of K, then those of V.
    fn identity(&self, head: u64, token: u64, byte: u64) -> Identity {
        let (part, byte) = match self.packed {
            Some(k) if byte < k => (0, byte),
            Some(k) => (1, byte - k),
            None => (self.part, byte),
        };
        assert!(byte < 1 << 10 && token < 1 << 20 && head < 1 << 8);
        1 | self.group << 56 | self.layer << 48 | part << 44 | head << 32 | token << 12 | byte << 1
    }
}

/// Every byte of the blocks in `lists` that a rank holds.
pub fn places(model: &ModelSpec, rank: &RankCache, lists: &[List], mut see: impl FnMut(Place)) {
    for area in &rank.geometry.areas {
        let group = &rank.geometry.groups[area.group as usize];
        let state = group.kind == GroupKind::State;
        let whole = !state && group.block_size > 1 && area.tokens * area.pages == 1;
        let name = Name::new(model, area, whole);
        let list = &lists[area.group as usize];
        // A state is that of the last block.
        let blocks = if state { &list.blocks[list.blocks.len().saturating_sub(1)..] } else { &list.blocks[..] };
        let (ranks, this) = (u64::from(group.token_ranks), u64::from(group.token_rank));
        let interleave = u64::from(group.token_interleave);
        for &(entry, block) in blocks {
            for position in 0..u64::from(area.pages) * u64::from(area.tokens) {
                let token = if state {
                    position
                } else if whole {
                    entry * u64::from(group.block_size) * ranks + this
                } else {
                    let (turn, within) = (position / interleave, position % interleave);
                    entry * u64::from(group.block_size) * ranks + (turn * ranks + this) * interleave + within
                };
                let (page, in_page) = (position / u64::from(area.tokens), position % u64::from(area.tokens));
                for head in 0..u64::from(area.heads) {
                    let base = area.offset
                        + u64::from(block) * area.block_stride
                        + head * area.head_stride
                        + page * area.page_stride
                        + in_page * area.token_stride;
                    for byte in 0..u64::from(area.units) * area.content {
                        let (unit, within) = (byte / area.content, byte % area.content);
                        let head = head + u64::from(area.first_head);
                        see(Place {
                            region: area.region as usize,
                            offset: (base + unit * area.unit_stride + within) as usize,
                            group: area.group as usize,
                            token,
                            identity: name.identity(head, token, byte),
                        });
                    }
                }
            }
        }
    }
}

/// Which tokens of a group travel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Travel {
    /// All that the consumer has a place for.
    State,
    /// These.
    Tokens(BTreeSet<u64>),
    /// The producer lacks some of them, or the consumer has no block for one that the next token looks at.
    Refused,
}

/// The definition: the tokens asked for, up to a whole grain, that are in a block of the consumer's which the window
/// touches. What the producer has dropped may be missing in front of the window if nobody reads it there, and so may what the
/// token after the last one does not look at on the consumer's side.
pub fn travel(case: &Case, group: usize) -> Travel {
    let kind = case.model.groups[group].kind;
    if kind == GroupKind::State {
        return Travel::State;
    }
    let (local_span, remote_span) = (span(&case.consumer, group), span(&case.producer, group));
    let grain = gcd(local_span, remote_span);
    let (start, end) = case.tokens;
    let from = front(kind, end).unwrap_or(0);
    let next = front(kind, end + 1).unwrap_or(0);
    let has = |list: &List, entry: u64| list.blocks.iter().any(|(e, _)| *e == entry);
    let mut tokens = BTreeSet::new();
    if start == end {
        return Travel::Tokens(tokens);
    }
    for token in start..end.div_ceil(grain) * grain {
        let entry = token / local_span;
        if entry < from / local_span {
            continue;
        }
        if !has(&case.local[group], entry) {
            if next < end && (token / grain + 1) * grain > next {
                return Travel::Refused;
            }
            continue;
        }
        if has(&case.remote[group], token / remote_span) {
            tokens.insert(token);
        } else if !case.window_only || (token / grain + 1) * grain > from {
            return Travel::Refused;
        }
    }
    Travel::Tokens(tokens)
}
