//! The division of reads: every rank of the consumer engine gets each byte that it holds from exactly one rank of
//! the producer engine.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use super::block_grid::share_tokens;
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::{Geometry, Group};
use crate::ids::RankId;

/// One part of one layer that a rank holds, without where.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPart {
    /// As [`Area::layer`](crate::geometry::Area::layer).
    pub layer: String,
    /// As [`Area::part`](crate::geometry::Area::part).
    pub part: String,
    /// Index into [`Holding::groups`].
    pub group: u32,
    /// The first head.
    pub first_head: u32,
    /// Heads.
    pub heads: u32,
}

/// The parts of the cache that one rank holds. The holdings of all ranks say how the engine is split.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holding {
    /// The rank.
    pub rank: RankId,
    /// The KV-cache groups.
    pub groups: Vec<Group>,
    /// The parts.
    pub parts: Vec<HeldPart>,
}

impl Holding {
    /// The holding of a rank with this geometry.
    pub fn new(rank: RankId, geometry: &Geometry) -> Holding {
        let parts = geometry.areas.iter().map(|area| HeldPart {
            layer: area.layer.clone(),
            part: area.part.clone(),
            group: area.group,
            first_head: area.first_head,
            heads: area.heads,
        });
        Holding { rank, groups: geometry.groups.clone(), parts: parts.collect() }
    }

    /// True if both holdings are the same, in whatever order they are stated.
    pub fn holds_as(&self, other: &Holding) -> bool {
        let parts = |holding: &Holding| {
            let mut parts = holding.parts.clone();
            parts.sort_by(|a, b| (&a.layer, &a.part).cmp(&(&b.layer, &b.part)));
            parts
        };
        let tokens = |holding: &Holding| -> Vec<(u32, u32)> {
            holding.groups.iter().map(|group| (group.token_ranks, group.token_rank)).collect()
        };
        self.rank == other.rank && tokens(self) == tokens(other) && parts(self) == parts(other)
    }

    fn group(&self, part: &HeldPart) -> Option<&Group> {
        self.groups.get(part.group as usize)
    }
}

/// Heads of one part of a layer that one rank reads from another.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cell {
    /// The layer.
    pub layer: String,
    /// The part; packed K and V count as `k` and `v`.
    pub part: String,
    /// The first head, counted over all KV heads of the layer.
    pub first_head: u32,
    /// Heads.
    pub heads: u32,
}

/// One producer rank as a consumer rank sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Share {
    /// The parts to read from it. Empty for a rank that nobody reads from: some consumer rank still tells it when the
    /// request is over, so that its blocks are freed.
    pub cells: Vec<Cell>,
    /// How many consumer ranks the producer rank hears from, this one included.
    pub readers: u32,
}

/// Packed K and V are the parts `k` and `v` to a side that holds them apart.
pub(super) fn unpacked(part: &str) -> impl Iterator<Item = &str> {
    let (first, second) = if part == "kv" { ("k", Some("v")) } else { (part, None) };
    std::iter::once(first).chain(second)
}

/// The holders of a part: the number of the rank, and the part as it states it.
type Holders<'a> = Vec<(usize, &'a HeldPart)>;

/// The holders of every part of every layer.
#[derive(Default)]
struct HolderIndex<'a> {
    parts: Vec<((&'a str, &'a str), Holders<'a>)>,
    places: HashMap<(&'a str, &'a str), usize>,
}

impl<'a> HolderIndex<'a> {
    fn new(holdings: &[&'a Holding]) -> Self {
        let mut index = HolderIndex::default();
        for (number, &holding) in holdings.iter().enumerate() {
            // Ranks mostly state their parts in the same order. Then no name is hashed but those of the first rank.
            let mut next = 0;
            for part in &holding.parts {
                for name in unpacked(&part.part) {
                    let place = index.place((&part.layer, name), next);
                    if let Some((_, holders)) = index.parts.get_mut(place) {
                        holders.push((number, part));
                    }
                    next = place + 1;
                }
            }
        }
        index
    }

    /// Where the part is, which is at `guess` or has to be looked up.
    fn place(&mut self, name: (&'a str, &'a str), guess: usize) -> usize {
        if self.parts.get(guess).is_some_and(|(there, _)| *there == name) {
            return guess;
        }
        *self.places.entry(name).or_insert_with(|| {
            self.parts.push((name, Vec::new()));
            self.parts.len() - 1
        })
    }

    fn holders(&self, name: (&str, &str)) -> &[(usize, &'a HeldPart)] {
        let found = self.places.get(&name).and_then(|place| self.parts.get(*place));
        found.map(|(_, holders)| holders.as_slice()).unwrap_or_default()
    }

    fn names(&self) -> BTreeSet<(&'a str, &'a str)> {
        self.parts.iter().map(|(name, _)| *name).collect()
    }
}

fn incompatible(text: String) -> Error {
    Error::new(ErrorKind::Incompatible, text)
}

/// Assigns to the consumer rank `local` the producer ranks and what it reads from each.
///
/// Both lists are all of an engine's ranks, in any order; every consumer rank that is given the same lists comes to a
/// division that fits the others'. Where several producer ranks hold the same bytes (MLA, or fewer KV heads than ranks),
/// consumer ranks choose different ones in turn. `spread` shifts the choice where consumers are fewer than copies, so
/// that several consumer engines do not all choose the same: give a number that differs per consumer engine.
///
/// Errors: [`ErrorKind::Incompatible`] for a layer, head or token that a consumer rank holds and no producer rank, or the
/// other way round; [`ErrorKind::NotFound`] if `local` is not a consumer.
pub fn assign(
    local: RankId,
    consumers: &[Holding],
    producers: &[Holding],
    spread: u64,
) -> Result<BTreeMap<RankId, Share>> {
    fn sorted(holdings: &[Holding]) -> Vec<&Holding> {
        let mut sorted: Vec<&Holding> = holdings.iter().collect();
        sorted.sort_by_key(|holding| holding.rank);
        sorted
    }
    let (consumers, producers) = (sorted(consumers), sorted(producers));
    let own = consumers.iter().position(|holding| holding.rank == local);
    let own = own.ok_or_else(|| Error::not_found(format!("rank {local} is not among the ranks of its own engine")))?;
    let index = HolderIndex::new(&producers);
    check_layers(&HolderIndex::new(&consumers).names(), &index.names())?;
    let mut shares: BTreeMap<RankId, Share> = BTreeMap::new();
    let mut readers: Vec<u32> = vec![0; producers.len()];
    for (number, consumer) in consumers.iter().enumerate() {
        let mut read: BTreeSet<usize> = BTreeSet::new();
        let mut last: Option<(Split<'_>, Chosen)> = None;
        for part in &consumer.parts {
            for name in unpacked(&part.part) {
                let holders = index.holders((&part.layer, name));
                // Most layers are split as the one before.
                let chosen = match last.take() {
                    Some((split, chosen)) if is_split_as((part, holders), split) => chosen,
                    _ => choose(number, consumers.len(), spread, consumer, part, name, holders, &producers)?,
                };
                let (_, chosen) = last.insert(((part, holders), chosen));
                for &(producer, first_head, heads) in &*chosen {
                    read.insert(producer);
                    if let (true, Some(holding)) = (number == own, producers.get(producer)) {
                        let (layer, part) = (part.layer.clone(), name.to_owned());
                        let share = shares.entry(holding.rank).or_default();
                        share.cells.push(Cell { layer, part, first_head, heads });
                    }
                }
            }
        }
        for producer in read {
            if let Some(count) = readers.get_mut(producer) {
                *count += 1;
            }
        }
    }
    // Producer ranks that nobody reads from are told by one consumer rank each.
    let mut turn = 0;
    for (holding, count) in producers.iter().zip(&mut readers) {
        if *count == 0 {
            *count = 1;
            if turn % consumers.len().max(1) == own {
                shares.entry(holding.rank).or_default();
            }
            turn += 1;
        }
        if let Some(share) = shares.get_mut(&holding.rank) {
            share.readers = *count;
        }
    }
    Ok(shares)
}

/// A part that is read, and its holders.
type Split<'a> = (&'a HeldPart, &'a [(usize, &'a HeldPart)]);

/// True if a part of one layer has the same groups and heads, and of the same ranks, as a part of another.
fn is_split_as((part, holders): Split<'_>, (other, others): Split<'_>) -> bool {
    let heads = |part: &HeldPart| (part.group, part.first_head, part.heads);
    heads(part) == heads(other)
        && holders.len() == others.len()
        && holders.iter().zip(others).all(|((a, held), (b, other))| a == b && heads(held) == heads(other))
}

/// Both engines must have the same layers and parts.
fn check_layers(here: &BTreeSet<(&str, &str)>, there: &BTreeSet<(&str, &str)>) -> Result<()> {
    let layers = |names: &BTreeSet<(&str, &str)>| names.iter().map(|(layer, _)| *layer).collect::<BTreeSet<_>>().len();
    let text = |own: &BTreeSet<(&str, &str)>, other: &BTreeSet<(&str, &str)>| {
        let only = own.difference(other).next();
        let only = only.map(|(layer, part)| format!(", among them layer {layer:?} part {part:?} alone"));
        format!("{} layers{}", layers(own), only.unwrap_or_default())
    };
    if here == there {
        return Ok(());
    }
    Err(incompatible(format!(
        "set of layers differs: {} here, {} on the other side; start both engines with the same model and the same \
         speculative decoding",
        text(here, there),
        text(there, here)
    )))
}

/// Producer number, first head, heads.
type Chosen = Vec<(usize, u32, u32)>;

/// From whom the consumer number `number` reads the heads of a part.
#[allow(clippy::too_many_arguments)]
fn choose(
    number: usize,
    consumers: usize,
    spread: u64,
    consumer: &Holding,
    part: &HeldPart,
    name: &str,
    holders: &[(usize, &HeldPart)],
    producers: &[&Holding],
) -> Result<Chosen> {
    let Some(group) = consumer.group(part) else { return Ok(Vec::new()) };
    let (first, end) = (part.first_head, part.first_head.saturating_add(part.heads));
    // Who has which heads; per token rank, because dealt tokens have to come from each of them.
    let mut holders_by_token: BTreeMap<u32, Vec<(usize, u32, u32)>> = BTreeMap::new();
    let mut cuts = BTreeSet::from([first, end]);
    let mut token_ranks = BTreeSet::new();
    for (producer, held) in holders {
        let Some(theirs) = producers.get(*producer).and_then(|holding| holding.group(held)) else { continue };
        token_ranks.insert(theirs.token_ranks);
        let held_end = held.first_head.saturating_add(held.heads);
        cuts.extend([held.first_head, held_end].into_iter().filter(|cut| (first..end).contains(cut)));
        if share_tokens(group, theirs) {
            let holders = holders_by_token.entry(theirs.token_rank).or_default();
            holders.push((*producer, held.first_head, held_end));
        }
    }
    if token_ranks.len() > 1 {
        return Err(incompatible(format!(
            "layer {:?}: the ranks of the other side do not agree over how many ranks its tokens are dealt",
            part.layer
        )));
    }
    let needed: Vec<u32> = (0..token_ranks.first().copied().unwrap_or(1))
        .filter(|&token_rank| {
            let sample = holders.first().and_then(|(p, held)| producers.get(*p).and_then(|h| h.group(held)));
            sample.is_none_or(|sample| share_tokens(group, &Group { token_rank, ..sample.clone() }))
        })
        .collect();
    let cuts: Vec<u32> = cuts.into_iter().collect();
    let mut chosen = Chosen::new();
    for token_rank in needed {
        let holders = holders_by_token.get(&token_rank).map(Vec::as_slice).unwrap_or_default();
        for (&from, &to) in cuts.iter().zip(cuts.iter().skip(1)) {
            let able: Vec<usize> =
                holders.iter().filter(|(_, f, e)| *f <= from && *e >= to).map(|(p, ..)| *p).collect();
            let shift = if able.len() > consumers { spread } else { 0 };
            let turn = (number as u64).wrapping_add(shift) % (able.len() as u64).max(1);
            let Some(&producer) = able.get(usize::try_from(turn).unwrap_or(0)) else {
                return Err(incompatible(format!(
                    "layer {:?} part {name:?}: rank {} holds heads {from} to {} (tokens of rank {token_rank}), which no \
                     rank of the other side does; both engines need the same model, and all of the other engine's \
                     ranks must hand in their metadata",
                    part.layer,
                    consumer.rank,
                    to.saturating_sub(1)
                )));
            };
            match chosen.last_mut() {
                Some((last, f, n)) if *last == producer && f.saturating_add(*n) == from => *n += to - from,
                _ => chosen.push((producer, from, to - from)),
            }
        }
    }
    Ok(chosen)
}
