//! A rank's KV cache with contents that say where they belong.

use kvferry::connector::Worker;
use kvferry::mem::MemoryRange;
use kvferry::proto::geometry::{Area, Geometry, Group, GroupKind};
use kvferry::proto::ids::RankId;
use kvferry::proto::wire::MemoryKind;
use serde::{Deserialize, Serialize};

/// What the caches of one engine look like. Equal on two engines that fit, but for `blocks`, `padding` and `seed`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CacheSpec {
    pub tp: u32,
    pub pp: u32,
    /// Layers of each group on each pipeline stage.
    pub layers: u32,
    pub groups: Vec<Group>,
    /// Blocks per layer.
    pub blocks: u32,
    /// Heads per rank.
    pub heads: u32,
    /// Bytes per token and head.
    pub content: u64,
    /// Bytes between two blocks that belong to neither.
    pub padding: u64,
    /// Makes the untouched contents of two engines differ.
    pub seed: u64,
}

impl CacheSpec {
    /// Two groups, one of them with a window, and small blocks.
    pub fn small(tp: u32, pp: u32, seed: u64) -> CacheSpec {
        CacheSpec {
            tp,
            pp,
            layers: 2,
            groups: vec![Group::new(GroupKind::Full, 4), Group::new(GroupKind::SlidingWindow { window: 6 }, 2)],
            blocks: 40,
            heads: 2,
            content: 24,
            padding: 0,
            seed,
        }
    }
}

/// A mixing function; every bit of the result depends on every bit of the input.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn mixed(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |acc, part| mix(acc ^ part.wrapping_add(0x2545_f491_4f6c_dd1d)))
}

fn hash(text: &str) -> u64 {
    mixed(&text.bytes().map(u64::from).collect::<Vec<_>>())
}

pub struct Cache {
    spec: CacheSpec,
    rank: RankId,
    geometry: Geometry,
    /// One region per layer. Read and written by the ferry thread through its registration.
    regions: Vec<Vec<u8>>,
}

impl Cache {
    pub fn new(spec: CacheSpec, rank: RankId) -> Cache {
        let mut areas = Vec::new();
        let mut regions = Vec::new();
        let total_heads = spec.heads * spec.tp;
        for (index, group) in spec.groups.iter().enumerate() {
            for layer in 0..spec.layers {
                let region = regions.len() as u32;
                // Even layers keep K and V apart, one after the other; odd ones packed.
                let parts: &[&str] = if layer % 2 == 0 { &["k", "v"] } else { &["kv"] };
                let block = spec.content * u64::from(spec.heads * group.block_size);
                let stride = block + spec.padding;
                let part_len = stride * u64::from(spec.blocks);
                for (part_index, part) in parts.iter().enumerate() {
                    areas.push(Area {
                        layer: format!("stage.{}.group.{index}.layer.{layer}", rank.pp),
                        part: (*part).to_owned(),
                        group: index as u32,
                        region,
                        offset: part_len * part_index as u64,
                        num_blocks: spec.blocks,
                        block_stride: stride,
                        heads: spec.heads,
                        first_head: spec.heads * rank.tp,
                        total_heads,
                        head_stride: spec.content * u64::from(group.block_size),
                        tokens: group.block_size,
                        token_stride: spec.content,
                        content: spec.content,
                        ..Area::default()
                    });
                }
                let len = part_len * parts.len() as u64;
                let salt = mixed(&[spec.seed, rank.pp.into(), rank.tp.into(), region.into()]);
                regions.push((0..len).map(|i| mixed(&[salt, i]) as u8).collect());
            }
        }
        Cache { geometry: Geometry { groups: spec.groups.clone(), areas }, regions, rank, spec }
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

    /// Every byte of a block in one area, as (position in the region, which byte of the cache it is).
    fn bytes_of(area: &Area, block: u32) -> impl Iterator<Item = (usize, [u64; 3])> + '_ {
        let base = area.offset + area.block_stride * u64::from(block);
        (0..u64::from(area.heads)).flat_map(move |h| {
            (0..u64::from(area.tokens)).flat_map(move |t| {
                (0..area.content).map(move |c| {
                    let at = base + h * area.head_stride + t * area.token_stride + c;
                    (at as usize, [h + u64::from(area.first_head), t, c])
                })
            })
        })
    }

    /// What a request's block at `position` of its group's list holds.
    fn expected(request: u64, area: &Area, position: usize, [head, token, byte]: [u64; 3]) -> u8 {
        let place = mixed(&[hash(&area.layer), hash(&area.part), area.group.into()]);
        mixed(&[request, place, position as u64, head, token, byte]) as u8
    }

    /// Writes what a prefill of `request` would: per group the blocks in the order of the sequence, 0 for none.
    pub fn fill(&mut self, request: &str, blocks: &[Vec<u32>]) {
        let request = hash(request);
        for area in &self.geometry.areas {
            let Some(list) = blocks.get(area.group as usize) else { continue };
            for (position, block) in list.iter().enumerate() {
                // vLLM's null block: nothing of the sequence is there.
                if *block == 0 {
                    continue;
                }
                for (at, which) in Self::bytes_of(area, *block) {
                    self.regions[area.region as usize][at] = Self::expected(request, area, position, which);
                }
            }
        }
    }

    /// Checks every byte: what the loads (the producer's request name, the local blocks per group) brought, and
    /// everything else as it was at the start.
    pub fn check(&self, loads: &[(String, Vec<Vec<u32>>)]) -> Result<u64, String> {
        let mut want = Cache::new(self.spec.clone(), self.rank);
        for (request, blocks) in loads {
            want.fill(request, blocks);
        }
        let mut bytes = 0;
        for (region, (have, want)) in self.regions.iter().zip(&want.regions).enumerate() {
            // The ferry thread wrote these bytes: read them as they are now.
            let have = std::hint::black_box(have);
            let wrong = have.iter().zip(want).filter(|(a, b)| a != b).count();
            if let Some(first) = have.iter().zip(want).position(|(a, b)| a != b) {
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
