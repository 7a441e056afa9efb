//! Describes a deployment of two engines before it runs: which rank reads what from which rank.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Result};
use crate::proto::geometry::{Group, GroupKind};
use crate::proto::ids::{EngineId, RankId};
use crate::proto::plan::{Cell, CopyPlan, GATHER_BELOW, Holding, RankPlan, Segment, Wanted, assign};
use crate::proto::shape::{EngineSpec, ModelSpec, RankCache};
use crate::proto::wire::{Blocks, RankMetadata};

/// Most ranks of an engine that is described. The reads are worked out for every pair of ranks.
pub const MAX_DESCRIBED_RANKS: u32 = 128;
/// Most parts of layers that all ranks of an engine hold together.
pub const MAX_DESCRIBED_PARTS: u64 = 1 << 16;
/// Most tokens of a described request, and most blocks of its groups together.
pub const MAX_DESCRIBED_TOKENS: u64 = 1 << 24;

/// Two engines and a request between them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Deployment {
    /// The model of both.
    pub model: ModelSpec,
    /// The engine that prefills. Its `num_blocks` is raised to what the request needs.
    pub producer: EngineSpec,
    /// The engine that decodes; `num_blocks` likewise.
    pub consumer: EngineSpec,
    /// Tokens whose cache is handed over.
    pub tokens: u64,
    /// How many of them, from the front, the consumer has already.
    #[serde(default)]
    pub cached_tokens: u64,
    /// True if the consumer reuses blocks for other requests with the same prefix, as
    /// [`SchedulerMachineConfig::reuses_blocks`](crate::proto::scheduler::SchedulerMachineConfig::reuses_blocks).
    #[serde(default = "yes")]
    pub reuses_blocks: bool,
    /// True if the request's blocks lie one after the other. An engine that has just started hands them out so. Else
    /// no two are neighbours.
    #[serde(default)]
    pub consecutive_blocks: bool,
    /// Longest operation in bytes; the agent's default unless given.
    #[serde(default = "four_mebibytes")]
    pub max_operation_bytes: u64,
}

fn yes() -> bool {
    true
}

fn four_mebibytes() -> u64 {
    4 << 20
}

/// The parts of the cache that a rank holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DescribedRank {
    /// The rank.
    pub rank: RankId,
    /// Ranges of layers, first and last.
    pub layers: Vec<(u32, u32)>,
    /// Ranges of heads, first and last. Latents count as head 0.
    pub heads: Vec<(u32, u32)>,
    /// The rank's place among those that share the tokens, by group: number and count. `(0, 1)` where it has all.
    pub tokens: Vec<(u32, u32)>,
    /// Bytes that are read from it (producer) or that it reads (consumer).
    pub bytes: u64,
    /// Operations likewise.
    pub operations: u64,
    /// Producer: consumer ranks that it hears from before it frees the blocks. Consumer: producer ranks that it deals
    /// with.
    pub peers: u32,
}

/// The reads of one consumer rank from one producer rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DescribedLink {
    /// The rank that reads.
    pub consumer: RankId,
    /// From whom.
    pub producer: RankId,
    /// Ranges of layers, first and last. Empty where nothing is read and the consumer only says when it is over.
    pub layers: Vec<(u32, u32)>,
    /// Ranges of heads, first and last.
    pub heads: Vec<(u32, u32)>,
    /// Names of the parts; packed K and V count as `k` and `v`.
    pub parts: Vec<String>,
    /// Bytes.
    pub bytes: u64,
    /// Runs that repeat at every block, which the plan is kept as.
    pub segments: u64,
    /// Operations after merging.
    pub operations: u64,
    /// Bytes of the shortest operation. The next two are the median's and the longest's; 0 without operations.
    pub run_min: u64,
    /// See `run_min`.
    pub run_median: u64,
    /// See `run_min`.
    pub run_max: u64,
    /// Between host memories: true if messages carry the runs, many in each. They are so short on average, as
    /// [`GATHER_BELOW`] says. Over TCP everything travels so.
    pub gathered: bool,
    /// Bytes that the plan takes in memory.
    pub plan_bytes: u64,
}

/// The work of a deployment for one request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Description {
    /// The ranks of the engine that prefills, by pipeline stage and then tensor-parallel rank.
    pub producers: Vec<DescribedRank>,
    /// Those of the engine that decodes.
    pub consumers: Vec<DescribedRank>,
    /// Every pair of ranks that deal with each other, by consumer and then producer.
    pub links: Vec<DescribedLink>,
}

/// How many operations there are of which length.
type Lengths = BTreeMap<u64, u64>;

impl Deployment {
    /// Works out which rank reads what from which rank.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] and [`ErrorKind::Exhausted`] naming what cannot be;
    /// [`ErrorKind::Incompatible`] where the engines do not fit each other, as in their handshake.
    pub fn describe(&self) -> Result<Description> {
        self.check()?;
        let local = self.engine("decode", &self.consumer)?;
        let remote = self.engine("prefill", &self.producer)?;
        let holdings = |side: &EngineSide| side.ranks.iter().map(RankCache::holding).collect::<Vec<Holding>>();
        let (consumers, producers) = (holdings(&local), holdings(&remote));
        let layers = self.layer_numbers();
        let mut producers_read: BTreeMap<RankId, DescribedRank> =
            remote.ranks.iter().map(|cache| (cache.rank, held(cache, &layers))).collect();
        let mut described = Description { producers: Vec::new(), consumers: Vec::new(), links: Vec::new() };
        for (cache, here) in local.ranks.iter().zip(&local.metadata) {
            let mut consumer = held(cache, &layers);
            for (rank, share) in assign(cache.rank, &consumers, &producers, 0)? {
                let Some(there) = remote.metadata.iter().find(|metadata| metadata.rank == rank) else { continue };
                let plan = RankPlan::new(here, there, &share.cells)?.request(&Wanted {
                    local: &local.blocks,
                    remote: &remote.blocks,
                    tokens: (self.cached_tokens, self.tokens),
                    remote_tokens: self.tokens,
                    null_block: Some(0),
                    window_only: !self.reuses_blocks,
                })?;
                let link = self.link((cache.rank, rank), &share.cells, &plan, &layers);
                consumer.bytes = consumer.bytes.saturating_add(link.bytes);
                consumer.operations = consumer.operations.saturating_add(link.operations);
                consumer.peers += 1;
                if let Some(producer) = producers_read.get_mut(&rank) {
                    producer.bytes = producer.bytes.saturating_add(link.bytes);
                    producer.operations = producer.operations.saturating_add(link.operations);
                    producer.peers = share.readers;
                }
                described.links.push(link);
            }
            described.consumers.push(consumer);
        }
        described.producers = producers_read.into_values().collect();
        Ok(described)
    }

    fn check(&self) -> Result<()> {
        if self.tokens == 0 || self.tokens > MAX_DESCRIBED_TOKENS {
            return Err(Error::invalid(format!(
                "tokens: expected 1 to {MAX_DESCRIBED_TOKENS} tokens to hand over, got {}",
                self.tokens
            )));
        }
        if self.cached_tokens > self.tokens {
            return Err(Error::invalid(format!(
                "cached_tokens: expected at most the {} tokens that are handed over, got {}",
                self.tokens, self.cached_tokens
            )));
        }
        if self.max_operation_bytes == 0 {
            return Err(Error::invalid("max_operation_bytes: expected at least 1, got 0"));
        }
        if self.model.groups.is_empty() {
            return Err(Error::invalid("model.groups: expected at least one KV-cache group, got none"));
        }
        for (engine, spec) in [("producer", &self.producer), ("consumer", &self.consumer)] {
            let ranks = spec.shape().ranks();
            if ranks > MAX_DESCRIBED_RANKS {
                return Err(Error::new(
                    ErrorKind::Exhausted,
                    format!("{engine}: {ranks} ranks, at most {MAX_DESCRIBED_RANKS} are described"),
                ));
            }
            let groups = self.model.groups.iter();
            let parts: u64 = groups.map(|g| (g.layers.len() as u64).saturating_mul(g.parts.len() as u64)).sum();
            let parts = parts.saturating_mul(spec.tp.into());
            if parts > MAX_DESCRIBED_PARTS {
                return Err(Error::new(
                    ErrorKind::Exhausted,
                    format!(
                        "{engine}: its ranks hold {parts} parts of layers, at most {MAX_DESCRIBED_PARTS} are described"
                    ),
                ));
            }
        }
        Ok(())
    }

    fn layer_numbers(&self) -> HashMap<String, u32> {
        let groups = self.model.groups.iter();
        groups.flat_map(|group| group.layers.iter().map(|&layer| (group.layer_name(layer), layer))).collect()
    }

    fn engine(&self, name: &str, spec: &EngineSpec) -> Result<EngineSide> {
        let named = |e: Error| e.context(format_args!("the {name} engine"));
        // Groups are the same on every rank but for the rank's place among those that share tokens.
        let first = EngineSpec { num_blocks: 1, ..spec.clone() }.ranks(&self.model).map_err(named)?;
        let groups = first.first().map(|cache| cache.geometry.groups.clone()).unwrap_or_default();
        let (blocks, needed) = self.blocks(&groups, name == "decode").map_err(named)?;
        let spec = EngineSpec { num_blocks: spec.num_blocks.max(needed), ..spec.clone() };
        let ranks = spec.ranks(&self.model).map_err(named)?;
        let engine = EngineId::new(name).map_err(named)?;
        let metadata = ranks.iter().map(|cache| cache.metadata(&engine, spec.shape())).collect();
        Ok(EngineSide { ranks, metadata, blocks })
    }

    /// The request's blocks in each group, and how many blocks there must be.
    fn blocks(&self, groups: &[Group], receives: bool) -> Result<(Vec<Blocks>, u32)> {
        let mut next = 1u64;
        let step = if self.consecutive_blocks { 1 } else { 2 };
        let mut lists = Vec::with_capacity(groups.len());
        let mut all = 0u64;
        for group in groups {
            let span = group.span();
            let mut first = if receives { self.cached_tokens / span } else { 0 };
            // As vLLM counts it, for the token that follows.
            if let Some(front) = group.kind.front(self.tokens.saturating_add(1)) {
                first = first.max(front.min(self.tokens.saturating_sub(1)) / span);
            }
            let end = self.tokens.div_ceil(span);
            let count = if group.kind == GroupKind::State { 1 } else { end.saturating_sub(first) };
            all = all.saturating_add(count);
            if all > MAX_DESCRIBED_TOKENS {
                return Err(Error::new(
                    ErrorKind::Exhausted,
                    format!("the request needs more than {MAX_DESCRIBED_TOKENS} blocks; use larger blocks"),
                ));
            }
            let ids: Vec<u32> = (0..count).filter_map(|i| u32::try_from(next + i * step).ok()).collect();
            next += count * step;
            lists.push(ids.into());
        }
        Ok((lists, u32::try_from(next).unwrap_or(u32::MAX)))
    }

    fn link(
        &self,
        (consumer, producer): (RankId, RankId),
        cells: &[Cell],
        plan: &CopyPlan,
        layers: &HashMap<String, u32>,
    ) -> DescribedLink {
        let lengths = lengths(plan, self.max_operation_bytes);
        let operations = lengths.values().fold(0u64, |sum, count| sum.saturating_add(*count));
        let mut before = 0u64;
        let median = lengths.iter().find(|(_, count)| {
            before = before.saturating_add(**count);
            before > operations.saturating_sub(1) / 2
        });
        let length = |entry: Option<(&u64, &u64)>| entry.map_or(0, |(length, _)| *length);
        let parts: BTreeSet<&str> = cells.iter().map(|cell| &*cell.part).collect();
        let pairs = plan.blocks().saturating_mul(2 * size_of::<u32>() as u64);
        DescribedLink {
            consumer,
            producer,
            layers: ranges(cells.iter().filter_map(|cell| layers.get(&cell.layer)).map(|&layer| (layer, 1))),
            heads: ranges(cells.iter().map(|cell| (cell.first_head, cell.heads))),
            parts: parts.into_iter().map(str::to_owned).collect(),
            bytes: plan.bytes(),
            segments: plan.segments.len() as u64,
            operations,
            run_min: length(lengths.first_key_value()),
            run_median: length(median),
            run_max: length(lengths.last_key_value()),
            gathered: plan.mean_run().is_some_and(|run| run < GATHER_BELOW),
            plan_bytes: (plan.segments.len() as u64).saturating_mul(size_of::<Segment>() as u64).saturating_add(pairs),
        }
    }
}

/// An engine with the request's blocks.
struct EngineSide {
    ranks: Vec<RankCache>,
    metadata: Vec<RankMetadata>,
    blocks: Vec<Blocks>,
}

fn held(cache: &RankCache, layers: &HashMap<String, u32>) -> DescribedRank {
    let areas = &cache.geometry.areas;
    DescribedRank {
        rank: cache.rank,
        layers: ranges(areas.iter().filter_map(|area| layers.get(&area.layer)).map(|&layer| (layer, 1))),
        heads: ranges(areas.iter().map(|area| (area.first_head, area.heads))),
        tokens: cache.geometry.groups.iter().map(|group| (group.token_rank, group.token_ranks)).collect(),
        bytes: 0,
        operations: 0,
        peers: 0,
    }
}

/// Ranges of first and last, out of firsts and counts; what overlaps or touches becomes one.
pub(super) fn ranges(all: impl Iterator<Item = (u32, u32)>) -> Vec<(u32, u32)> {
    let sorted: BTreeSet<(u32, u32)> = all.filter(|(_, count)| *count > 0).collect();
    let mut merged: Vec<(u32, u32)> = Vec::new();
    for (first, count) in sorted {
        let last = first.saturating_add(count - 1);
        match merged.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = last.max(*end),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// The lengths of what [`CopyPlan::expand`] gives, without going through every operation: segments that use the same
/// list have the same runs of blocks.
fn lengths(plan: &CopyPlan, longest: u64) -> Lengths {
    let longest = longest.max(1);
    let runs: Vec<Lengths> = plan.lists.iter().map(|pair| consecutive(pair.local.ids(), pair.remote.ids())).collect();
    let mut lengths = Lengths::new();
    let mut add = |length: u64, count: u64| {
        if length > 0 && count > 0 {
            let sum = lengths.entry(length).or_default();
            *sum = sum.saturating_add(count);
        }
    };
    for segment in plan.segments.iter() {
        let Some(runs) = runs.get(segment.list as usize) else { continue };
        for (&blocks, &count) in runs {
            // Blocks that do not merge are so many runs of one.
            let (blocks, count) = if segment.is_dense() { (blocks, count) } else { (1, count.saturating_mul(blocks)) };
            let bytes = segment.len.saturating_mul(blocks);
            add(longest, (bytes / longest).saturating_mul(count));
            add(bytes % longest, count);
        }
    }
    lengths
}

/// How many runs of consecutive pairs there are of which length.
fn consecutive(local: &[u32], remote: &[u32]) -> Lengths {
    let mut lengths = Lengths::new();
    let mut run = 0u64;
    let mut before: Option<(u32, u32)> = None;
    for pair in local.iter().copied().zip(remote.iter().copied()) {
        let continues =
            before.is_some_and(|(l, r)| l.checked_add(1) == Some(pair.0) && r.checked_add(1) == Some(pair.1));
        if !continues && run > 0 {
            *lengths.entry(run).or_default() += 1;
            run = 0;
        }
        run += 1;
        before = Some(pair);
    }
    if run > 0 {
        *lengths.entry(run).or_default() += 1;
    }
    lengths
}

#[cfg(test)]
mod tests;
