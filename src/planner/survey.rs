//! Turns an engine's handshake into a model and a shape, and tells whether an engine of another shape fits it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

use super::describe::{MAX_DESCRIBED_RANKS, ranges};
use crate::error::{Error, ErrorKind, Result};
use crate::proto::geometry::{Area, Group, GroupKind};
use crate::proto::ids::{EngineId, Incarnation, RankId};
use crate::proto::plan::check_ranks;
use crate::proto::shape::{EngineSpec, ModelSpec};
use crate::proto::wire::{EngineShape, MemoryKind, Message, RankBlob, RankMetadata, VERSION};

const SAME_MODEL: &str = "start both engines with the same model, or correct the options that describe this side";

/// The side that asks: an engine that need not run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnSide {
    /// Its model.
    pub model: ModelSpec,
    /// Its shape.
    pub engine: EngineSpec,
    /// Compatibility fields by name, those that are known; only these are compared.
    #[serde(default)]
    pub compat: BTreeMap<String, String>,
}

/// One rank of the engine that answered.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SurveyedRank {
    /// The rank.
    pub rank: RankId,
    /// Its agent's name.
    pub name: String,
    /// Version of the UCX that it uses.
    pub ucx_version: String,
    /// Registered regions.
    pub regions: u64,
    /// Bytes in them.
    pub bytes: u64,
    /// Where they are: `host`, `cuda 0`, ...
    pub memory: Vec<String>,
    /// Ranges of layers, first and last.
    pub layers: Vec<(u32, u32)>,
    /// Ranges of heads, first and last.
    pub heads: Vec<(u32, u32)>,
    /// Blocks of each KV-cache group.
    pub blocks: Vec<u32>,
}

/// One field of the comparison.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SurveyedField {
    /// The fact that is compared, such as `KV heads of the model`.
    pub name: String,
    /// This side's value; none where this side is not described.
    pub here: Option<String>,
    /// The engine's.
    pub there: String,
    /// True if both must have the same.
    pub must_match: bool,
    /// True if it fits; none where nothing is compared.
    pub fits: Option<bool>,
    /// The remedy where it does not fit.
    pub remedy: String,
}

/// The answer of an engine's listener, in the words of a model and its shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Survey {
    /// The newest protocol version that both speak.
    pub protocol: u16,
    /// The engine.
    pub engine: EngineId,
    /// Its incarnation, as 16 hexadecimal digits.
    pub incarnation: String,
    /// Its shape.
    pub shape: EngineShape,
    /// Its ranks.
    pub ranks: Vec<SurveyedRank>,
    /// Field by field, what it has, and whether this side fits it.
    pub fields: Vec<SurveyedField>,
}

/// The ranks of a reply, decoded and checked each for itself and against the reply.
///
/// With them the newest protocol version that this build has in common with all of them.
///
/// Errors: [`ErrorKind::Corrupt`] and what [`RankMetadata::validate`] finds; [`ErrorKind::Incompatible`] for ranks that
/// are not those of `engine` with this shape.
pub fn decode_ranks(engine: &EngineId, shape: EngineShape, ranks: &[RankBlob]) -> Result<(Vec<RankMetadata>, u16)> {
    shape.validate()?;
    let mut protocol = VERSION;
    let mut decoded: BTreeMap<RankId, RankMetadata> = BTreeMap::new();
    for blob in ranks {
        let (one, versions) = RankMetadata::from_sender(&blob.metadata)?;
        protocol = protocol.min(versions.common());
        if one.rank != blob.rank || one.engine != *engine || one.shape != shape {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!(
                    "the listener of engine {engine} ({shape}) gave metadata of rank {} of engine {} ({}) as that of rank \
                     {}",
                    one.rank, one.engine, one.shape, blob.rank
                ),
            ));
        }
        one.validate().map_err(|e| e.context(format_args!("rank {}", one.rank)))?;
        decoded.insert(one.rank, one);
    }
    if decoded.len() != shape.ranks() as usize {
        return Err(Error::new(
            ErrorKind::Incompatible,
            format!("engine {engine} has {} ranks ({shape}), its listener gave {}", shape.ranks(), decoded.len()),
        ));
    }
    Ok((decoded.into_values().collect(), protocol))
}

impl Survey {
    /// Surveys an engine's ranks, as [`decode_ranks`] gives them with the `protocol` version. Compares them with this
    /// side where it is described.
    ///
    /// Errors: [`ErrorKind::InvalidArgument`] and [`ErrorKind::Exhausted`] for a side that cannot be.
    pub fn of(
        incarnation: Incarnation,
        ranks: &[RankMetadata],
        protocol: u16,
        own: Option<&OwnSide>,
    ) -> Result<Survey> {
        let Some(first) = ranks.first() else { return Err(Error::invalid("an engine without ranks")) };
        let numbers = layer_numbers(ranks);
        let there = SurveyedEngine { ranks, numbers: &numbers };
        let fields = match own {
            None => there.facts().into_iter().map(|fact| fact.alone()).chain(compat_alone(first)).collect(),
            Some(own) => compare(own, &there, first)?,
        };
        Ok(Survey {
            protocol,
            engine: first.engine.clone(),
            incarnation: incarnation.to_string(),
            shape: first.shape,
            ranks: ranks.iter().map(|rank| there.surveyed(rank)).collect(),
            fields,
        })
    }
}

/// Which number each layer name stands for: the one whole number in it (as vLLM names layers), if that tells all apart;
/// else its place among the names.
fn layer_numbers(ranks: &[RankMetadata]) -> HashMap<String, u32> {
    let names: BTreeMap<&str, bool> = ranks
        .iter()
        .flat_map(|rank| rank.geometry.areas.iter().map(|area| (&*area.layer, is_state(rank, area))))
        .collect();
    let mut seen = BTreeSet::new();
    let by_name: Option<HashMap<String, u32>> = names
        .iter()
        .map(|(name, state)| {
            let number = number_in(name)?;
            seen.insert((number, *state)).then(|| ((*name).to_owned(), number))
        })
        .collect();
    by_name.unwrap_or_else(|| (0..).zip(names).map(|(number, (name, _))| (name.to_owned(), number)).collect())
}

fn is_state(rank: &RankMetadata, area: &Area) -> bool {
    group(rank, area).is_some_and(|group| group.kind == GroupKind::State)
}

fn group<'a>(rank: &'a RankMetadata, area: &Area) -> Option<&'a Group> {
    rank.geometry.groups.get(area.group as usize)
}

fn number_in(name: &str) -> Option<u32> {
    let mut numbers = name.split('.').filter_map(|part| part.parse::<u32>().ok());
    let number = numbers.next()?;
    numbers.next().is_none().then_some(number)
}

/// Something that an engine has, in words.
struct Fact {
    name: String,
    value: String,
    must_match: bool,
}

impl Fact {
    fn alone(self) -> SurveyedField {
        let Fact { name, value, must_match } = self;
        SurveyedField { name, here: None, there: value, must_match, fits: None, remedy: String::new() }
    }
}

fn compat_alone(rank: &RankMetadata) -> impl Iterator<Item = SurveyedField> {
    rank.compat.iter().map(|field| {
        Fact { name: field.name.clone(), value: field.value.clone(), must_match: !field.informative }.alone()
    })
}

struct SurveyedEngine<'a> {
    ranks: &'a [RankMetadata],
    numbers: &'a HashMap<String, u32>,
}

impl SurveyedEngine<'_> {
    fn number(&self, area: &Area) -> u32 {
        self.numbers.get(&area.layer).copied().unwrap_or(0)
    }

    fn areas(&self) -> impl Iterator<Item = (&RankMetadata, &Area)> {
        self.ranks.iter().flat_map(|rank| rank.geometry.areas.iter().map(move |area| (rank, area)))
    }

    /// A value that may differ by layer: alone where it does not, else with the layers that have it.
    fn by_layer(&self, value: impl Fn(&RankMetadata, &Area) -> Option<String>) -> String {
        let mut values: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
        for (rank, area) in self.areas() {
            if let Some(value) = value(rank, area) {
                values.entry(value).or_default().insert(self.number(area));
            }
        }
        if values.len() < 2 {
            return values.into_keys().next().unwrap_or_else(|| "none".to_owned());
        }
        let one = |(value, layers): (String, BTreeSet<u32>)| format!("{value} in layers {}", ranges_text(layers));
        values.into_iter().map(one).collect::<Vec<_>>().join("; ")
    }

    fn facts(&self) -> Vec<Fact> {
        let shape = self.ranks.first().map_or(EngineShape { tp: 1, pp: 1, dcp: 1 }, |rank| rank.shape);
        let whole = self.areas().any(|(rank, area)| is_whole(rank, area));
        let layers: BTreeSet<u32> = self.areas().map(|(_, area)| self.number(area)).collect();
        let fact = |name: &str, value: String, must_match| Fact { name: name.to_owned(), value, must_match };
        vec![
            fact("layers", format!("{} ({})", layers.len(), ranges_text(layers)), true),
            fact("kinds of cache", self.by_layer(|rank, area| Some(group(rank, area)?.kind.to_string())), true),
            fact("KV heads of the model", self.by_layer(|_, area| Some(area.total_heads.to_string())), true),
            fact("bytes per token and head", self.bytes(), true),
            fact("tensor-parallel size", shape.tp.to_string(), false),
            fact("pipeline-parallel size", shape.pp.to_string(), false),
            fact("decode-context-parallel size", shape.dcp.to_string(), false),
            fact(
                "tokens per block",
                self.by_layer(|rank, area| Some(group(rank, area)?.block_size.to_string())),
                whole,
            ),
            fact("order in a block", self.by_layer(|rank, area| Some(order(rank, area).to_owned())), whole),
        ]
    }

    /// K and V together, since engines may pack them or not.
    fn bytes(&self) -> String {
        let mut parts: BTreeMap<u32, BTreeMap<&str, u64>> = BTreeMap::new();
        for (_, area) in self.areas() {
            parts.entry(self.number(area)).or_default().insert(&area.part, area.token_bytes());
        }
        let text = |number: u32| {
            let parts = parts.get(&number)?;
            let k_and_v = parts.get("kv").copied().or_else(|| Some(parts.get("k")?.saturating_add(*parts.get("v")?)));
            let others = parts.iter().filter(|(name, _)| k_and_v.is_none() || !["k", "v", "kv"].contains(*name));
            let named = others.map(|(name, bytes)| format!("{name} {bytes}"));
            Some(k_and_v.map(|bytes| format!("k+v {bytes}")).into_iter().chain(named).collect::<Vec<_>>().join(", "))
        };
        self.by_layer(|_, area| text(self.number(area)))
    }

    fn surveyed(&self, rank: &RankMetadata) -> SurveyedRank {
        let geometry = &rank.geometry;
        let memory: BTreeSet<String> = rank
            .agent
            .regions
            .iter()
            .map(|region| match region.kind {
                MemoryKind::Host => "host".to_owned(),
                MemoryKind::Cuda { device } => format!("cuda {device}"),
            })
            .collect();
        let blocks = (0..).take(geometry.groups.len()).map(|group| geometry.num_blocks(group).unwrap_or(0));
        SurveyedRank {
            rank: rank.rank,
            name: rank.agent.name.clone(),
            ucx_version: rank.agent.ucx_version.clone(),
            regions: rank.agent.regions.len() as u64,
            bytes: rank.agent.regions.iter().fold(0, |sum, region| sum.saturating_add(region.len)),
            memory: memory.into_iter().collect(),
            layers: ranges(geometry.areas.iter().map(|area| (self.number(area), 1))),
            heads: ranges(geometry.areas.iter().map(|area| (area.first_head, area.heads))),
            blocks: blocks.collect(),
        }
    }

    /// The ranks with layers named by their numbers, as [`EngineSpec::ranks`] names them.
    fn renamed(&self) -> Vec<RankMetadata> {
        let mut ranks = self.ranks.to_vec();
        for rank in &mut ranks {
            let states: Vec<bool> = rank.geometry.areas.iter().map(|area| is_state(rank, area)).collect();
            for (area, state) in rank.geometry.areas.iter_mut().zip(states) {
                let number = self.numbers.get(&area.layer).copied().unwrap_or(0);
                area.layer = format!("layers.{number}.{}", if state { "state" } else { "attn" });
            }
        }
        ranks
    }
}

fn is_whole(rank: &RankMetadata, area: &Area) -> bool {
    area.positions() == 1 && group(rank, area).is_some_and(|group| group.block_size > 1)
}

fn order(rank: &RankMetadata, area: &Area) -> &'static str {
    if is_whole(rank, area) {
        "the engine's own (blocks move whole)"
    } else if area.heads == 1 || area.positions() == 1 {
        "either (one head or one token in a block)"
    } else if area.head_stride > area.token_stride {
        "head-major"
    } else {
        "token-major"
    }
}

fn count(ranks: usize) -> String {
    if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") }
}

fn ranges_text(numbers: BTreeSet<u32>) -> String {
    let one = |(first, last)| if first == last { format!("{first}") } else { format!("{first}-{last}") };
    ranges(numbers.into_iter().map(|number| (number, 1))).into_iter().map(one).collect::<Vec<_>>().join(",")
}

fn compare(own: &OwnSide, there: &SurveyedEngine<'_>, first: &RankMetadata) -> Result<Vec<SurveyedField>> {
    let shape = own.engine.shape();
    if shape.ranks() > MAX_DESCRIBED_RANKS {
        let text = format!("this side: {} ranks, at most {MAX_DESCRIBED_RANKS} are compared", shape.ranks());
        return Err(Error::new(ErrorKind::Exhausted, text));
    }
    let named = |e: Error| e.context("this side");
    let engine = EngineId::new("here").map_err(named)?;
    let caches = own.engine.ranks(&own.model).map_err(named)?;
    let ours: Vec<RankMetadata> = caches.iter().map(|cache| cache.metadata(&engine, shape)).collect();
    let numbers = layer_numbers(&ours);
    let here = SurveyedEngine { ranks: &ours, numbers: &numbers };
    let mut fields: Vec<SurveyedField> = here
        .facts()
        .into_iter()
        .zip(there.facts())
        .map(|(ours, theirs)| {
            let must_match = ours.must_match || theirs.must_match;
            let fits = !must_match || ours.value == theirs.value;
            let remedy = if fits { "" } else { SAME_MODEL }.to_owned();
            let (name, there) = (theirs.name, theirs.value);
            SurveyedField { name, here: Some(ours.value), there, must_match, fits: Some(fits), remedy }
        })
        .collect();
    for field in compat_alone(first) {
        fields.push(match own.compat.get(&field.name) {
            None => field,
            Some(ours) => {
                let fits = *ours == field.there || !field.must_match;
                let remedy =
                    if fits { String::new() } else { format!("start both engines with the same {}", field.name) };
                SurveyedField { here: Some(ours.clone()), fits: Some(fits), remedy, ..field }
            }
        });
    }
    for (name, ours) in own.compat.iter().filter(|(name, _)| first.compat.iter().all(|field| field.name != **name)) {
        fields.push(SurveyedField {
            name: name.clone(),
            here: Some(ours.clone()),
            there: "missing".to_owned(),
            must_match: true,
            fits: Some(false),
            remedy: "start both engines with the same release of kvferry and of vLLM".to_owned(),
        });
    }
    let theirs = there.renamed();
    let pairs = ours.iter().flat_map(|ours| theirs.iter().map(move |theirs| (ours, theirs)));
    let clash = pairs.map(|(ours, theirs)| check_ranks(ours, theirs)).find_map(Result::err);
    // What the handshake itself checks. The rest above tells why, and what it only finds out from other fields.
    fields.push(SurveyedField {
        name: "check of every pair of ranks".to_owned(),
        here: Some(count(ours.len())),
        there: count(theirs.len()),
        must_match: true,
        fits: Some(clash.is_none()),
        remedy: clash.map_or_else(String::new, |error| error.message().to_owned()),
    });
    Ok(fields)
}

#[cfg(test)]
mod tests;
