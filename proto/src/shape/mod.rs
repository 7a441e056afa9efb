//! From a model and an engine's shape to what each rank holds and where: geometries without an engine.
//!
//! [`ModelSpec`] says what a token's cache is, [`EngineSpec`] how an engine splits it over ranks and lays it out in
//! memory. [`EngineSpec::ranks`] gives every rank's [`Geometry`] and the lengths of its regions. The rules are those of
//! vLLM 0.32, so that a deployment can be checked before it runs.

mod layout;

use serde::{Deserialize, Serialize};

use super::geometry::{Geometry, Group, GroupKind, MAX_AREAS, MAX_AXIS, MAX_GROUPS};
use super::ids::{EngineId, Incarnation, RankId};
use super::plan::Holding;
use super::wire::{AgentMetadata, EngineShape, RankMetadata, RegionMetadata};
use crate::error::{Error, ErrorKind, Result};

/// The parts of a model's cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSpec {
    /// The KV-cache groups, in the engines' order.
    pub groups: Vec<GroupSpec>,
}

/// One KV-cache group of a model: layers that share one block table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSpec {
    /// Kind of cache.
    pub kind: GroupKind,
    /// Numbers of the layers, counted from 0 over the whole model. A layer is in one group only, but may have a state
    /// and attention both.
    pub layers: Vec<u32>,
    /// The parts that each of these layers keeps.
    pub parts: Vec<PartSpec>,
}

/// One part of a layer's cache, such as K.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartSpec {
    /// Its name: `k`, `v`, `latent`, `conv`, `ssm`.
    pub name: String,
    /// KV heads of the whole model; 1 for a latent, and for a state that is not cut. For other states, the units by
    /// which tensor parallelism cuts it, such as channels.
    pub heads: u32,
    /// Positions of a state, such as the columns of a convolution; else 1.
    #[serde(default = "one")]
    pub positions: u32,
    /// Bytes per head and token, or per head and position.
    pub bytes: u64,
}

fn one() -> u32 {
    1
}

impl GroupSpec {
    /// Attention over K and V of so many bytes per token and head. `heads` are those of the whole model.
    pub fn attention(
        kind: GroupKind,
        layers: impl IntoIterator<Item = u32>,
        heads: u32,
        k_bytes: u64,
        v_bytes: u64,
    ) -> Self {
        let part = |name: &str, bytes| PartSpec { name: name.into(), heads, positions: 1, bytes };
        GroupSpec { kind, layers: layers.into_iter().collect(), parts: vec![part("k", k_bytes), part("v", v_bytes)] }
    }

    /// Compressed latents (MLA) of so many bytes per token.
    pub fn latent(layers: impl IntoIterator<Item = u32>, bytes: u64) -> Self {
        let part = PartSpec { name: "latent".into(), heads: 1, positions: 1, bytes };
        GroupSpec { kind: GroupKind::Latent, layers: layers.into_iter().collect(), parts: vec![part] }
    }

    /// States without token positions (Mamba, SSM).
    pub fn state(layers: impl IntoIterator<Item = u32>, parts: Vec<PartSpec>) -> Self {
        GroupSpec { kind: GroupKind::State, layers: layers.into_iter().collect(), parts }
    }

    /// The global name of one of its layers.
    pub fn layer_name(&self, number: u32) -> String {
        let what = if self.kind == GroupKind::State { "state" } else { "attn" };
        format!("layers.{number}.{what}")
    }
}

/// The order of a block's bytes, for every head and token of a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Tokens outside heads.
    TokenMajor,
    /// Heads outside tokens.
    HeadMajor,
    /// vLLM's CPU attention: per head the K of all tokens, turned so that the tokens of an element of `element` bytes
    /// lie next to each other, then V by tokens. Latents are kept token-major and states head-major.
    Turned {
        /// Bytes that stay together; divides K's bytes.
        element: u64,
    },
    /// An order of the engine's own: nobody can tell a block's tokens apart. States are kept head-major.
    Whole,
}

/// Where a layer's parts lie with respect to each other. [`Layout::Turned`] has an arrangement of its own for K and V.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Parts {
    /// K and V next to each other for each token and head. Other parts are kept as by [`Parts::InBlock`].
    Packed,
    /// One after the other in each block.
    InBlock,
    /// Each in regions of its own.
    Regions,
}

/// The shape of an engine: its split over ranks, and each rank's layout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EngineSpec {
    /// Tensor-parallel size. Heads are dealt as evenly as can be, more of them to the first ranks; where there are
    /// fewer heads than ranks, neighbouring ranks hold the same head. Latents are on every rank.
    pub tp: u32,
    /// Pipeline-parallel size.
    pub pp: u32,
    /// Layers of each pipeline stage. Empty for vLLM's own split: as even as can be, with what is over on the stages
    /// before the last.
    pub stages: Vec<u32>,
    /// Decode-context-parallel size; divides `tp`. Tokens are dealt to `dcp` neighbouring ranks, which hold the same
    /// heads: those of rank `tp_rank / dcp` of `tp / dcp`. States are not affected.
    pub dcp: u32,
    /// Consecutive tokens that go to the same rank; divides the block sizes.
    pub dcp_interleave: u32,
    /// Tokens per block on each rank: one number per KV-cache group, or one for all. That of a state is not used.
    pub block_size: Vec<u32>,
    /// Physical blocks per block of the block table; divides the block sizes.
    pub pages: u32,
    /// Order within a block.
    pub layout: Layout,
    /// How parts are kept.
    pub parts: Parts,
    /// True if a group's layers share an allocation, layer by layer in each (physical) block. Else each layer has
    /// regions of its own.
    pub layers_in_block: bool,
    /// True if all groups share regions, block by block, as in vLLM's hybrid caches. The first layers of all groups
    /// are in the same region, and so on. A block id is then used in one group at a time.
    pub shared_groups: bool,
    /// Blocks in each region.
    pub num_blocks: u32,
    /// Unused bytes before each region's first block.
    pub lead: u64,
    /// Unused bytes after each block.
    pub gap: u64,
}

impl Default for EngineSpec {
    /// One rank, 16 tokens per block, token-major, every layer in a region of its own with K before V in each block.
    fn default() -> EngineSpec {
        EngineSpec {
            tp: 1,
            pp: 1,
            stages: Vec::new(),
            dcp: 1,
            dcp_interleave: 1,
            block_size: vec![16],
            pages: 1,
            layout: Layout::TokenMajor,
            parts: Parts::InBlock,
            layers_in_block: false,
            shared_groups: false,
            num_blocks: 1024,
            lead: 0,
            gap: 0,
        }
    }
}

/// One rank's cache: the map, and the memory that it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankCache {
    /// The rank.
    pub rank: RankId,
    /// Where it keeps what.
    pub geometry: Geometry,
    /// Bytes of each region, in the order of the geometry's region numbers.
    pub region_lens: Vec<u64>,
}

impl RankCache {
    /// The rank's holding: the parts it has, without their places.
    pub fn holding(&self) -> Holding {
        Holding::new(self.rank, &self.geometry)
    }

    /// The rank's metadata as others would get it, without memory that could be reached.
    pub fn metadata(&self, engine: &EngineId, shape: EngineShape) -> RankMetadata {
        let agent = AgentMetadata {
            name: engine.to_string(),
            incarnation: Incarnation(1),
            ucx_version: String::new(),
            address: Vec::new(),
            regions: self.region_lens.iter().copied().map(RegionMetadata::unreachable).collect(),
            late_regions: Vec::new(),
        };
        let (rank, geometry) = (self.rank, self.geometry.clone());
        RankMetadata { engine: engine.clone(), rank, shape, compat: Vec::new(), geometry, agent }
    }
}

/// Which `(first, count)` of `heads` are the `index`-th share of `ranks`.
fn heads_of(heads: u32, index: u32, ranks: u32) -> (u32, u32) {
    let ranks = ranks.max(1);
    if heads < ranks {
        let head = u64::from(index).saturating_mul(heads.into()) / u64::from(ranks);
        return (u32::try_from(head).unwrap_or(0), 1);
    }
    let (each, over) = (heads / ranks, heads % ranks);
    (index.saturating_mul(each).saturating_add(index.min(over)), each + u32::from(index < over))
}

impl EngineSpec {
    /// The engine's sizes.
    pub fn shape(&self) -> EngineShape {
        EngineShape { tp: self.tp, pp: self.pp, dcp: self.dcp }
    }

    /// Tokens per block of the KV-cache group number `group`, if there is one.
    pub fn block_size_of(&self, group: usize) -> Option<u32> {
        if let [all] = *self.block_size { Some(all) } else { self.block_size.get(group).copied() }
    }

    /// Layers of each pipeline stage of a model with `layers` layers.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] for stages that do not add up, and for stages without a layer.
    pub fn split(&self, layers: u32) -> Result<Vec<u32>> {
        if self.pp == 0 || layers < self.pp {
            return Err(Error::invalid(format!(
                "{layers} layers cannot be split over {} pipeline stages; every stage needs a layer",
                self.pp
            )));
        }
        if self.stages.is_empty() {
            let (each, over) = (layers / self.pp, layers % self.pp);
            // The last stage gets nothing that is over, the one before it does first.
            return Ok((0..self.pp)
                .map(|stage| each + u32::from((2..over.saturating_add(2)).contains(&(self.pp - stage))))
                .collect());
        }
        let sum: u64 = self.stages.iter().map(|&stage| u64::from(stage)).sum();
        if self.stages.len() as u64 != u64::from(self.pp) || self.stages.contains(&0) || sum != u64::from(layers) {
            return Err(Error::invalid(format!(
                "pipeline stages of {:?} layers for a pipeline-parallel size of {} and {layers} layers; give one number \
                 per stage, at least 1, that add up to the model's layers",
                self.stages, self.pp
            )));
        }
        Ok(self.stages.clone())
    }

    /// Every rank's cache, by pipeline stage and then tensor-parallel rank. Every geometry is valid for regions of the
    /// lengths given.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] for a model or engine that cannot be, naming what is wrong;
    /// [`ErrorKind::Exhausted`] and [`ErrorKind::OutOfRange`] for one beyond the limits of a geometry.
    pub fn ranks(&self, model: &ModelSpec) -> Result<Vec<RankCache>> {
        let layers = self.check(model)?;
        let mut ranks = Vec::new();
        let mut first = 0u32;
        for (pp, count) in (0..).zip(self.split(layers)?) {
            let end = first.saturating_add(count);
            for tp in 0..self.tp {
                ranks.push(self.rank(model, RankId { pp, tp }, first..end)?);
            }
            first = end;
        }
        Ok(ranks)
    }

    fn rank(&self, model: &ModelSpec, rank: RankId, layers: std::ops::Range<u32>) -> Result<RankCache> {
        let dcp = self.dcp.max(1);
        let mut groups = Vec::new();
        for (index, spec) in model.groups.iter().enumerate() {
            let mut group = Group::new(spec.kind, 1);
            if spec.kind != GroupKind::State {
                group.block_size = self.block_size_of(index).unwrap_or(1);
                (group.token_ranks, group.token_rank) = (dcp, rank.tp % dcp);
                group.token_interleave = self.dcp_interleave;
            }
            groups.push(group);
        }
        let (areas, region_lens) = layout::lay_out(self, model, rank, &layers);
        let geometry = Geometry { groups, areas };
        let regions: Vec<RegionMetadata> = region_lens.iter().copied().map(RegionMetadata::unreachable).collect();
        geometry.validate(&regions).map_err(|e| e.context(format_args!("rank {rank}")))?;
        Ok(RankCache { rank, geometry, region_lens })
    }

    /// Checks what the geometries' own check would not name well, or only after much work; gives the model's number of
    /// layers.
    fn check(&self, model: &ModelSpec) -> Result<u32> {
        self.shape().validate()?;
        if !self.tp.is_multiple_of(self.dcp) {
            return Err(Error::invalid(format!(
                "decode-context-parallel size {} does not divide tensor-parallel size {}",
                self.dcp, self.tp
            )));
        }
        if self.pages == 0 {
            return Err(Error::invalid("0 physical blocks per block, expected at least 1"));
        }
        if self.layout == Layout::Whole && self.pages != 1 {
            return Err(Error::invalid(format!(
                "{} physical blocks per block in an order of the engine's own; such a layout has 1",
                self.pages
            )));
        }
        let groups = model.groups.len();
        if groups > MAX_GROUPS || ![1, groups].contains(&self.block_size.len()) {
            return Err(Error::invalid(format!(
                "{} block sizes for {groups} KV-cache groups; give one for each, or one for all, of at most {MAX_GROUPS}",
                self.block_size.len()
            )));
        }
        let mut names = std::collections::BTreeSet::new();
        let mut areas = 0usize;
        for (index, group) in model.groups.iter().enumerate() {
            self.check_group(index, group)?;
            areas = areas.saturating_add(group.layers.len().saturating_mul(group.parts.len()));
            if areas > MAX_AREAS {
                return Err(Error::new(
                    ErrorKind::Exhausted,
                    format!("the model has more than {MAX_AREAS} parts of layers, the most that can be"),
                ));
            }
            for &layer in &group.layers {
                if layer >= MAX_AXIS || !names.insert((layer, group.kind == GroupKind::State)) {
                    return Err(Error::invalid(format!(
                        "KV-cache group {index} names layer {layer}, which another one does too or which is not below \
                         {MAX_AXIS}"
                    )));
                }
            }
        }
        Ok(names.last().map_or(0, |(last, _)| last.saturating_add(1)))
    }

    fn check_group(&self, index: usize, group: &GroupSpec) -> Result<()> {
        let state = group.kind == GroupKind::State;
        let size = self.block_size_of(index).unwrap_or(0);
        if !state && (size == 0 || !size.is_multiple_of(self.pages)) {
            return Err(Error::invalid(format!(
                "KV-cache group {index}: blocks of {size} tokens cannot consist of {} physical blocks",
                self.pages
            )));
        }
        if group.parts.is_empty() {
            return Err(Error::invalid(format!("KV-cache group {index} has no parts, expected K and V or such")));
        }
        for part in &group.parts {
            if part.heads == 0 || part.positions == 0 || part.bytes == 0 || part.heads > MAX_AXIS {
                return Err(Error::invalid(format!(
                    "KV-cache group {index}, part {:?}: {} heads of {} positions of {} bytes; expected at least 1 of \
                     each and at most {MAX_AXIS} heads",
                    part.name, part.heads, part.positions, part.bytes
                )));
            }
            if !state && part.positions != 1 {
                return Err(Error::invalid(format!(
                    "KV-cache group {index}, part {:?} has {} positions; only a state has, attention has tokens",
                    part.name, part.positions
                )));
            }
        }
        if let (Layout::Turned { element }, Some((k, _))) = (self.layout, layout::k_and_v(group))
            && (element == 0 || !k.bytes.is_multiple_of(element))
        {
            return Err(Error::invalid(format!(
                "KV-cache group {index}: a K of {} bytes cannot be cut into elements of {element} bytes",
                k.bytes
            )));
        }
        let unequal = |(k, v): (&PartSpec, &PartSpec)| k.heads != v.heads;
        if layout::k_and_v(group).is_some_and(unequal) {
            return Err(Error::invalid(format!("KV-cache group {index}: K and V have different numbers of heads")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
