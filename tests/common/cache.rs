//! A rank's KV cache with contents that say where they belong.

use kvferry::connector::Worker;
use kvferry::mem::MemoryRange;
use kvferry::proto::geometry::{Area, Geometry, Group, GroupKind};
use kvferry::proto::ids::RankId;
use kvferry::proto::shape::{EngineSpec, GroupSpec, ModelSpec};
use kvferry::proto::wire::MemoryKind;
use serde::{Deserialize, Serialize};

use super::memory::{difference, pattern_bytes};

/// What the caches of one engine look like. Two engines fit when their models are the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CacheSpec {
    pub model: ModelSpec,
    pub engine: EngineSpec,
    /// Makes the untouched contents of two engines differ.
    pub seed: u64,
}

/// A received request: its name on the producer, the local block lists from token 0 on (0 where there is no block),
/// and per group the tokens that were loaded, the last of them rounded up to what travels together.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Loaded {
    pub request: String,
    pub blocks: Vec<Vec<u32>>,
    pub tokens: Vec<(u64, u64)>,
}

impl Loaded {
    /// Every token of the blocks.
    pub fn whole(request: &str, blocks: &[Vec<u32>]) -> Loaded {
        Loaded { request: request.into(), blocks: blocks.to_vec(), tokens: vec![(0, u64::MAX); blocks.len()] }
    }
}

impl CacheSpec {
    /// Two groups, one of them with a window, small blocks, and on each rank two heads of two layers of either group.
    pub fn small(tp: u32, pp: u32, seed: u64) -> CacheSpec {
        let layers = |first: u32| (0..2 * pp).map(move |i| i / 2 * 4 + i % 2 + first);
        let window = GroupKind::SlidingWindow { window: 6 };
        CacheSpec {
            model: ModelSpec {
                groups: vec![
                    GroupSpec::attention(GroupKind::Full, layers(0), 2 * tp, 24, 24),
                    GroupSpec::attention(window, layers(2), 2 * tp, 24, 24),
                ],
            },
            engine: EngineSpec { tp, pp, block_size: vec![4, 2], num_blocks: 40, ..EngineSpec::default() },
            seed,
        }
    }

    /// As the scheduler side is told them.
    pub fn groups(&self) -> Vec<Group> {
        let groups = self.model.groups.iter().enumerate();
        groups
            .map(|(index, group)| {
                if group.kind == GroupKind::State {
                    return Group::new(group.kind, 1);
                }
                let block_size = self.engine.block_size_of(index).unwrap();
                let (token_ranks, token_interleave) = (self.engine.dcp, self.engine.dcp_interleave);
                Group { token_ranks, token_interleave, ..Group::new(group.kind, block_size) }
            })
            .collect()
    }
}

/// A mixing function; every bit of the result depends on every bit of the input.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// What came before, and one part more.
fn stir(before: u64, part: u64) -> u64 {
    mix(before ^ part.wrapping_add(0x2545_f491_4f6c_dd1d))
}

fn mixed(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |before, part| stir(before, *part))
}

fn hash(text: &str) -> u64 {
    mixed(&text.bytes().map(u64::from).collect::<Vec<_>>())
}

pub struct Cache {
    spec: CacheSpec,
    rank: RankId,
    geometry: Geometry,
    /// Read and written by the progress thread through its registration.
    regions: Vec<Vec<u8>>,
}

impl Cache {
    pub fn new(spec: CacheSpec, rank: RankId) -> Cache {
        let ranks = spec.engine.ranks(&spec.model).unwrap();
        let own = ranks.into_iter().find(|cache| cache.rank == rank).unwrap();
        let regions = own.region_lens.iter().enumerate().map(|(region, &len)| {
            let salt = mixed(&[spec.seed, rank.pp.into(), rank.tp.into(), region as u64]);
            pattern_bytes(salt, len as usize)
        });
        Cache { geometry: own.geometry, regions: regions.collect(), rank, spec }
    }

    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Registers every region and states the geometry.
    pub fn give_to(&self, worker: &Worker) -> kvferry::Result<()> {
        for (index, region) in self.regions.iter().enumerate() {
            // SAFETY: the harness keeps the cache until the worker is shut down, and looks at or changes a block only
            // while no transfer of it is under way.
            let range = unsafe { MemoryRange::new(region.as_ptr() as u64, region.len() as u64, MemoryKind::Host)? };
            assert_eq!(worker.register(range)?, index as u32);
        }
        worker.set_geometry(self.geometry.clone())
    }

    /// The token of the sequence that a rank's block number `index` holds at `position`: the reverse of what
    /// `Group::position` says.
    fn token(group: &Group, index: u64, position: u64) -> u64 {
        let (every, ranks) = (u64::from(group.token_interleave), u64::from(group.token_ranks));
        let round = position / every;
        index * group.span() + (round * ranks + u64::from(group.token_rank)) * every + position % every
    }

    /// The parts of which a token's bytes in an area consist: of each its first byte, and what its contents begin with. K and
    /// V count as parts also where they are packed, so that they are the same bytes in either layout.
    fn parts(&self, request: u64, area: &Area) -> Vec<(u64, u64)> {
        let of = |part: &str| mixed(&[request, hash(&area.layer), hash(part)]);
        match &*area.part {
            "kv" => vec![(0, of("k")), (self.spec.model.groups[area.group as usize].parts[0].bytes, of("v"))],
            part => vec![(0, of(part))],
        }
    }

    /// Writes what a prefill of `request` would: per group the blocks in the order of the sequence, 0 for none.
    pub fn fill(&mut self, request: &str, blocks: &[Vec<u32>]) {
        self.fill_tokens(&Loaded::whole(request, blocks));
    }

    fn fill_tokens(&mut self, loaded: &Loaded) {
        let request = hash(&loaded.request);
        for area in self.geometry.areas.clone() {
            let Some(list) = loaded.blocks.get(area.group as usize) else { continue };
            let group = &self.geometry.groups[area.group as usize].clone();
            let state = group.kind == GroupKind::State;
            let (from, to) = loaded.tokens[area.group as usize];
            let parts = self.parts(request, &area);
            for (index, block) in list.iter().enumerate() {
                // vLLM's null block: nothing of the sequence is there. Of a state only the last block counts.
                if *block == 0 || (state && index + 1 != list.len()) {
                    continue;
                }
                for head in 0..u64::from(area.heads) {
                    for position in 0..u64::from(area.positions()) {
                        // A block of one position is one whose tokens cannot be told apart: it counts as its first token.
                        let token = if state { position } else { Self::token(group, index as u64, position) };
                        if state || (from..to).contains(&token) {
                            self.fill_token(&area, &parts, (*block, head, position), token);
                        }
                    }
                }
            }
        }
    }

    /// Every byte of a token in one area: of the head and at the position of a block.
    fn fill_token(&mut self, area: &Area, parts: &[(u64, u64)], (block, head, position): (u32, u64, u64), token: u64) {
        let tokens = u64::from(area.tokens);
        let base = area.offset
            + area.block_stride * u64::from(block)
            + head * area.head_stride
            + position / tokens * area.page_stride
            + position % tokens * area.token_stride;
        let region = &mut self.regions[area.region as usize];
        for (index, (first, begun)) in parts.iter().enumerate() {
            let begun = stir(stir(*begun, token), head + u64::from(area.first_head));
            let end = parts.get(index + 1).map_or(area.token_bytes(), |(next, _)| *next);
            for byte in *first..end {
                let at = base + byte / area.content * area.unit_stride + byte % area.content;
                region[at as usize] = stir(begun, byte - first) as u8;
            }
        }
    }

    /// Checks every byte: what the loads brought, and everything else as it was at the start.
    pub fn check(&self, loads: &[Loaded]) -> Result<u64, String> {
        let mut want = Cache::new(self.spec.clone(), self.rank);
        for loaded in loads {
            want.fill_tokens(loaded);
        }
        let mut bytes = 0;
        for (region, (have, want)) in self.regions.iter().zip(&want.regions).enumerate() {
            // The progress thread wrote these bytes: read them as they are now.
            let have = std::hint::black_box(have);
            if let Some(first) = difference(have, want) {
                let wrong = have.iter().zip(want).filter(|(a, b)| a != b).count();
                return Err(format!(
                    "rank {}: {wrong} of {} bytes of region {region} are wrong, the first at {first}",
                    self.rank,
                    have.len()
                ));
            }
            bytes += have.len() as u64;
        }
        Ok(bytes)
    }
}
