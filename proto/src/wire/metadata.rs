//! The metadata of agents and ranks.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

use super::RegionMetadata;
use super::limits::{MAX_COMPAT_FIELDS, MAX_RANKS, MAX_REGIONS};
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::Geometry;
use crate::ids::{EngineId, Incarnation, RankId};

/// All that a remote agent needs to connect and to read or write registered regions. Its size grows with regions,
/// never with blocks.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AgentMetadata {
    /// A name for logs, chosen by the owner.
    pub name: String,
    /// This life of the agent.
    pub incarnation: Incarnation,
    /// Version text of the UCX that the agent uses.
    pub ucx_version: String,
    /// UCX worker address in its checked envelope.
    #[serde(with = "serde_bytes")]
    pub address: Vec<u8>,
    /// Exported regions. Their order is the region index in [`Geometry`] and in transfers.
    pub regions: Vec<RegionMetadata>,
    /// Exported regions whose index is [`MAX_REGIONS`] or more, by rising index. Readers of older releases know none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub late_regions: Vec<LateRegion>,
}

/// A region behind those that have a position in [`AgentMetadata::regions`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LateRegion {
    /// Its index in transfers.
    pub index: u32,
    /// How to reach it.
    pub region: RegionMetadata,
}

/// One region of an agent, for a peer that knows the agent already. Regions that are registered later need no new
/// [`AgentMetadata`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AgentRegion {
    /// The life of the agent that has it.
    pub incarnation: Incarnation,
    /// Its index in transfers.
    pub index: u32,
    /// How to reach it.
    pub region: RegionMetadata,
}

/// How an engine is split over ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EngineShape {
    /// Tensor-parallel size, at least 1.
    pub tp: u32,
    /// Pipeline-parallel size, at least 1.
    pub pp: u32,
    /// Decode-context-parallel size, at least 1.
    pub dcp: u32,
}

impl EngineShape {
    /// Errors: [`ErrorKind::InvalidArgument`] for a size of 0, [`ErrorKind::Exhausted`] for more than [`MAX_RANKS`]
    /// ranks.
    pub fn validate(&self) -> Result<()> {
        for (name, size) in [("tensor", self.tp), ("pipeline", self.pp), ("decode-context", self.dcp)] {
            if size == 0 {
                return Err(Error::invalid(format!("the engine's {name}-parallel size is 0, expected at least 1")));
            }
        }
        if self.ranks() > MAX_RANKS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("an engine of {self} has {} ranks, at most {MAX_RANKS} can be", self.ranks()),
            ));
        }
        Ok(())
    }

    /// Ranks in the engine. Saturates.
    pub fn ranks(&self) -> u32 {
        self.tp.saturating_mul(self.pp)
    }

    /// The engine's ranks, ascending.
    pub fn rank_ids(self) -> impl Iterator<Item = RankId> {
        (0..self.pp).flat_map(move |pp| (0..self.tp).map(move |tp| RankId { pp, tp }))
    }

    /// True if `rank` is one of the engine's.
    pub fn contains(&self, rank: RankId) -> bool {
        rank.pp < self.pp && rank.tp < self.tp
    }
}

impl fmt::Display for EngineShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp {} x pp {} x dcp {}", self.tp, self.pp, self.dcp)
    }
}

/// One fact that must be the same on both engines, such as model or dtype. Facts are compared by name, so that an
/// error can say which field differs and what either side has.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CompatField {
    /// The field's name, such as `model`.
    pub name: String,
    /// Its value as text.
    pub value: String,
    /// True if the sender states by other fields all that this one stands for. Where both sides say so, a difference is
    /// told and not an error.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub informative: bool,
}

/// The metadata of one rank, as ranks of other engines get it in the handshake.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankMetadata {
    /// The engine that the rank belongs to.
    pub engine: EngineId,
    /// The rank's place in it.
    pub rank: RankId,
    /// The engine's shape.
    pub shape: EngineShape,
    /// Facts that both engines must share.
    pub compat: Vec<CompatField>,
    /// Where the rank keeps which part of the cache.
    pub geometry: Geometry,
    /// How to reach its memory.
    pub agent: AgentMetadata,
}

impl AgentMetadata {
    /// The regions with their indices; those that are gone are described as [`RegionMetadata::unreachable`].
    pub fn indexed(&self) -> impl Iterator<Item = (u32, &RegionMetadata)> {
        let late = self.late_regions.iter().map(|late| (late.index, &late.region));
        (0..).zip(&self.regions).chain(late)
    }

    /// Checks how many regions there are, and the indices of the late ones.
    ///
    /// Errors: [`ErrorKind::Exhausted`] for more than [`MAX_REGIONS`], [`ErrorKind::Corrupt`] for an index that has a
    /// position in [`AgentMetadata::regions`] or does not rise.
    pub fn check_regions(&self) -> Result<()> {
        let count = self.indexed().filter(|(_, region)| !region.is_gone()).count();
        if count > MAX_REGIONS || self.regions.len() > MAX_REGIONS || self.late_regions.len() > MAX_REGIONS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!(
                    "agent {:?} exports {count} regions, {} of them by position; at most {MAX_REGIONS} can be",
                    self.name,
                    self.regions.len()
                ),
            ));
        }
        let indices = || self.late_regions.iter().map(|late| late.index);
        let low = indices().find(|index| (*index as usize) < MAX_REGIONS);
        if let Some(index) = low.or(indices().zip(indices().skip(1)).find(|(a, b)| a >= b).map(|(_, index)| index)) {
            return Err(Error::corrupt(format!(
                "late region {index} of agent {:?} is not behind all others: expected rising indices from \
                     {MAX_REGIONS} on",
                self.name
            )));
        }
        Ok(())
    }

    /// As [`AgentMetadata::check_regions`], and that none is empty or wraps around the address space.
    ///
    /// Errors: as [`AgentMetadata::check_regions`], [`ErrorKind::OutOfRange`].
    pub fn validate(&self) -> Result<()> {
        self.check_regions()?;
        for (index, region) in self.indexed() {
            if region.len == 0 || region.base.checked_add(region.len).is_none() {
                return Err(Error::new(
                    ErrorKind::OutOfRange,
                    format!(
                        "region {index} of agent {:?} has {} bytes at {:#x}: empty, or beyond the address space",
                        self.name, region.len, region.base
                    ),
                ));
            }
        }
        Ok(())
    }
}

impl RankMetadata {
    /// Checks everything that needs no other side. That is shape, rank, compatibility fields, regions and geometry.
    ///
    /// Errors: as [`EngineShape::validate`], [`AgentMetadata::validate`] and [`Geometry::validate`];
    /// [`ErrorKind::InvalidArgument`] for a rank outside the shape and for a compatibility field named twice.
    pub fn validate(&self) -> Result<()> {
        self.shape.validate()?;
        if !self.shape.contains(self.rank) {
            return Err(Error::invalid(format!(
                "rank {} is not in engine {}, which is {}",
                self.rank, self.engine, self.shape
            )));
        }
        if self.compat.len() > MAX_COMPAT_FIELDS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{} compatibility fields, at most {MAX_COMPAT_FIELDS} can be", self.compat.len()),
            ));
        }
        let mut names = BTreeSet::new();
        if let Some(field) = self.compat.iter().find(|field| !names.insert(&field.name)) {
            return Err(Error::invalid(format!("compatibility field {:?} is given twice", field.name)));
        }
        self.agent.validate()?;
        self.geometry.validate(&self.agent.regions)
    }
}

/// An opaque encoded [`RankMetadata`].
pub(super) type Blob = ByteBuf;
