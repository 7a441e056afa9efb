//! Address maps and plans: a map that is accepted has every byte inside its region and no two places of a group on one
//! byte, found by listing them; a plan between two accepted maps copies between bytes of both, and writes none twice.

use std::collections::HashMap;

use kvferry::proto::geometry::{Area, Geometry, Group, GroupKind};
use kvferry::proto::ids::{Incarnation, RankId};
use kvferry::proto::plan::{Holding, RankPlan, Wanted, assign};
use kvferry::proto::wire::{AgentMetadata, Blocks, EngineShape, RankMetadata, RegionMetadata};

use super::Source;
use super::machines::rank;

const LAYERS: [&str; 2] = ["a", "b"];
const PARTS: [&str; 4] = ["k", "v", "kv", "latent"];
/// Maps with more places than this are not listed.
const LISTED: u64 = 1 << 15;

fn group(source: &mut Source) -> Group {
    let kind = match source.below(6) {
        0 | 1 => GroupKind::Full,
        2 => GroupKind::SlidingWindow { window: source.number() as u32 },
        3 => GroupKind::Chunked { chunk: source.number() as u32 },
        4 => GroupKind::Latent,
        _ => GroupKind::State,
    };
    let mut group = Group::new(kind, 1 + source.below(6) as u32);
    if source.rarely(8) {
        group.block_size = source.number() as u32;
    }
    if source.rarely(6) {
        (group.token_ranks, group.token_rank) = (source.number() as u32, source.number() as u32);
        group.token_interleave = source.number() as u32;
    }
    group
}

/// Mostly a dense area, with single fields changed.
fn area(source: &mut Source, groups: &[Group], offset: u64) -> Area {
    let number = source.below(groups.len().max(1)) as u32;
    let positions = groups.get(number as usize).map_or(1, |group| group.block_size).max(1);
    let (heads, content) = (1 + source.below(3) as u32, 1 + source.below(4) as u64);
    let by_token = source.flag();
    let inner = u64::from(if by_token { heads } else { positions }) * content;
    let (token_stride, head_stride) = if by_token { (inner, content) } else { (content, inner) };
    let bytes = u64::from(heads) * u64::from(positions) * content;
    let mut area = Area {
        layer: LAYERS[source.below(LAYERS.len())].into(),
        part: PARTS[source.below(PARTS.len())].into(),
        group: number,
        region: 0,
        offset,
        num_blocks: 1 + source.below(5) as u32,
        block_stride: bytes.saturating_mul(1 + source.below(2) as u64),
        heads,
        first_head: 0,
        total_heads: heads,
        head_stride,
        tokens: positions,
        token_stride,
        content,
        ..Area::default()
    };
    for _ in 0..source.below(3) {
        let value = source.number();
        match source.below(17) {
            0 => area.offset = value,
            1 => area.num_blocks = value as u32,
            2 => area.block_stride = value,
            3 => area.heads = value as u32,
            4 => area.first_head = value as u32,
            5 => area.total_heads = value as u32,
            6 => area.head_stride = value,
            7 => area.pages = value as u32,
            8 => area.page_stride = value,
            9 => area.tokens = value as u32,
            10 => area.token_stride = value,
            11 => area.units = value as u32,
            12 => area.unit_stride = value,
            13 => area.content = value,
            14 => area.group = value as u32,
            15 => area.region = value as u32,
            _ => (area.heads, area.total_heads) = (1, area.heads),
        }
    }
    area
}

fn metadata(source: &mut Source, name: &str) -> RankMetadata {
    let groups: Vec<Group> = (0..1 + source.below(2)).map(|_| group(source)).collect();
    let mut areas: Vec<Area> = Vec::new();
    for _ in 0..1 + source.below(3) {
        let offset = match source.below(4) {
            0 => 0,
            1 => source.number(),
            _ => areas.last().and_then(Area::end).unwrap_or(0),
        };
        areas.push(area(source, &groups, offset));
    }
    let len = if source.rarely(8) { source.number() } else { 1 << 14 };
    let region = RegionMetadata { base: 1 << 32, rkey: vec![1], ..RegionMetadata::unreachable(len) };
    RankMetadata {
        engine: rank::engine(name),
        rank: RankId { pp: 0, tp: 0 },
        shape: EngineShape { tp: 1, pp: 1, dcp: 1 },
        compat: vec![],
        geometry: Geometry { groups, areas },
        agent: AgentMetadata {
            name: name.into(),
            incarnation: Incarnation(7),
            ucx_version: "1.22.0".into(),
            address: vec![9],
            regions: vec![region],
            late_regions: vec![],
        },
    }
}

/// Every byte of an area at a block.
fn bytes_of(area: &Area, block: u64) -> impl Iterator<Item = u64> + '_ {
    let at = area.offset + block * area.block_stride;
    (0..u64::from(area.heads)).flat_map(move |h| {
        (0..u64::from(area.pages)).flat_map(move |p| {
            (0..u64::from(area.tokens)).flat_map(move |t| {
                (0..u64::from(area.units)).flat_map(move |u| {
                    let run = h * area.head_stride + p * area.page_stride + t * area.token_stride;
                    (0..area.content).map(move |c| at + run + u * area.unit_stride + c)
                })
            })
        })
    })
}

/// The rules of an accepted map, by listing its bytes.
fn check_accepted(metadata: &RankMetadata) {
    let size = |area: &Area| {
        let heads = u64::from(area.heads).saturating_mul(area.num_blocks.into());
        heads.saturating_mul(area.positions().into()).saturating_mul(area.token_bytes())
    };
    let all = metadata.geometry.areas.iter().map(size).fold(0u64, u64::saturating_add);
    if all > LISTED {
        return;
    }
    // Who lies on a byte: group and block.
    let mut owners: HashMap<(u32, u64), Vec<(u32, u64)>> = HashMap::new();
    for area in &metadata.geometry.areas {
        let region = &metadata.agent.regions[area.region as usize];
        for block in 0..u64::from(area.num_blocks) {
            for byte in bytes_of(area, block) {
                assert!(byte < region.len, "{area}: byte {byte} of a region of {}", region.len);
                let here = owners.entry((area.region, byte)).or_default();
                for &(group, other) in here.iter() {
                    assert_ne!(group, area.group, "{area}: two places of a group are byte {byte}");
                    assert_eq!(other, block, "{area}: shares byte {byte} with another block of group {group}");
                }
                here.push((area.group, block));
            }
        }
    }
}

fn lists(source: &mut Source, metadata: &RankMetadata) -> Vec<Blocks> {
    let count = metadata.geometry.groups.len() - usize::from(source.rarely(16));
    (0..count)
        .map(|group| {
            let blocks = metadata.geometry.num_blocks(group as u32).unwrap_or(1).min(200) as usize;
            let first = source.below(blocks.max(1)) as u32;
            let ids: Vec<u32> = (0..source.below(5) as u32).map(|n| first.saturating_add(n)).collect();
            if source.rarely(8) {
                source.bytes(4).iter().map(|&b| u32::from(b)).collect::<Vec<_>>().into()
            } else {
                ids.into()
            }
        })
        .collect()
}

/// Two maps and requests between them.
pub fn run(data: &[u8]) {
    let mut source = Source::new(data);
    let local = metadata(&mut source, "d");
    let remote = if source.flag() {
        let mut same = local.clone();
        same.engine = rank::engine("p");
        same
    } else {
        metadata(&mut source, "p")
    };
    let accepted = [&local, &remote].map(|metadata| {
        let ok = metadata.validate().is_ok();
        if ok {
            check_accepted(metadata);
        }
        ok
    });
    if accepted != [true, true] {
        return;
    }
    let holding = |metadata: &RankMetadata| vec![Holding::new(metadata.rank, &metadata.geometry)];
    let Ok(shares) = assign(local.rank, &holding(&local), &holding(&remote), source.number()) else { return };
    for share in shares.values() {
        let Ok(plan) = RankPlan::new(&local, &remote, &share.cells) else { continue };
        for _ in 0..4 {
            let (here, there) = (lists(&mut source, &local), lists(&mut source, &remote));
            let end = source.number();
            let wanted = Wanted {
                local: &here,
                remote: &there,
                tokens: (source.number(), end),
                remote_tokens: if source.rarely(4) { source.number() } else { end },
                null_block: source.flag().then_some(0),
                window_only: source.flag(),
            };
            let Ok(plan) = plan.request(&wanted) else { continue };
            let (ours, theirs) = (local.agent.regions[0].len, remote.agent.regions[0].len);
            let len = |of_first| move |region: u32| (region == 0).then_some(of_first);
            plan.check(len(ours), len(theirs)).expect("a plan that was made is inside the regions");
            let bytes = plan.bytes();
            let mut copied = 0;
            let mut written: HashMap<u64, u64> = HashMap::new();
            for op in plan.expand(1 + source.number() % 64).take(1 << 16) {
                assert!(op.len > 0 && op.local_offset + op.len <= ours && op.remote_offset + op.len <= theirs);
                copied += op.len;
                if copied <= LISTED {
                    for n in 0..op.len {
                        let from = written.insert(op.local_offset + n, op.remote_offset + n);
                        let twice = from.is_some() && unique(&here);
                        assert!(!twice, "byte {} is written twice", op.local_offset + n);
                    }
                }
            }
            assert!(copied == bytes || bytes > 1 << 16, "{copied} bytes of {bytes} are copied");
        }
    }
}

/// Whether no block is named twice, in one list or in two.
fn unique(lists: &[Blocks]) -> bool {
    let mut ids: Vec<u32> = lists.iter().flat_map(|list| list.ids().iter().copied()).collect();
    ids.sort_unstable();
    ids.windows(2).all(|pair| pair[0] != pair[1])
}
