//! Limits, indices and ends of a geometry, and the cutting of an area into contiguous runs.

use std::collections::HashSet;

use super::{
    Area, Geometry, Group, GroupKind, MAX_AREAS, MAX_AXIS, MAX_GROUPS, MAX_LAYER_BYTES, MAX_PART_BYTES, MAX_RUNS,
};
use crate::error::{Error, ErrorKind, Result};
use crate::wire::RegionMetadata;

/// Where a contiguous run starts, in each of `N` address maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece<const N: usize>(pub [u64; N]);

/// Axes: how many steps, and the bytes of one in each of `N` address maps. The first is the outermost.
pub(crate) type Axes<const N: usize> = [(u32, [u64; N]); 4];

/// Cuts `content` bytes that repeat along axes into the fewest runs that are contiguous in all `N` maps: the length of
/// a run, and where each starts. Arithmetic wraps; checked areas do not.
pub(crate) fn fold<const N: usize>(
    base: [u64; N],
    content: u64,
    axes: Axes<N>,
) -> (u64, impl Iterator<Item = Piece<N>>) {
    let (len, axes) = folded(content, axes);
    let all = axes.iter().fold(1u64, |all, (count, _)| all.saturating_mul(u64::from(*count)));
    let pieces = (0..all).map(move |index| {
        let (mut at, mut rest) = (base, index);
        for (count, strides) in axes.iter().rev() {
            let count = u64::from(*count).max(1);
            let step = rest % count;
            rest /= count;
            for (at, stride) in at.iter_mut().zip(strides) {
                *at = at.wrapping_add(step.wrapping_mul(*stride));
            }
        }
        Piece(at)
    });
    (len, pieces)
}

/// The run length of [`fold`], and the axes that are left, the contiguous ones with count 1.
pub(crate) fn folded<const N: usize>(content: u64, mut axes: Axes<N>) -> (u64, Axes<N>) {
    let mut len = content;
    for _ in 0..axes.len() {
        for (count, strides) in &mut axes {
            if *count > 1 && strides.iter().all(|&stride| stride == len) {
                len = len.wrapping_mul(u64::from(*count));
                *count = 1;
            }
        }
    }
    (len, axes)
}

/// How many runs [`fold`] gives. Saturates.
pub(crate) fn runs<const N: usize>(content: u64, axes: Axes<N>) -> u64 {
    folded(content, axes).1.iter().fold(1u64, |all, (count, _)| all.saturating_mul(u64::from(*count)))
}

impl Area {
    /// The head, page, token and unit axes, for [`fold`].
    pub(crate) fn axes(&self) -> Axes<1> {
        [
            (self.heads, [self.head_stride]),
            (self.pages, [self.page_stride]),
            (self.tokens, [self.token_stride]),
            (self.units, [self.unit_stride]),
        ]
    }
}

fn over(what: &str, found: usize, limit: usize) -> Result<()> {
    if found > limit {
        return Err(Error::new(
            ErrorKind::Exhausted,
            format!("the geometry has {found} {what}, at most {limit} can be"),
        ));
    }
    Ok(())
}

/// Everything but overlap.
pub(super) fn check(geometry: &Geometry, regions: &[RegionMetadata]) -> Result<()> {
    over("KV-cache groups", geometry.groups.len(), MAX_GROUPS)?;
    over("areas", geometry.areas.len(), MAX_AREAS)?;
    for (index, group) in geometry.groups.iter().enumerate() {
        if group.block_size == 0 || group.block_size > MAX_AXIS {
            return Err(Error::invalid(format!(
                "KV-cache group {index} has block size {}, expected 1 to {MAX_AXIS} tokens",
                group.block_size
            )));
        }
        if group.kind == GroupKind::State && group.block_size != 1 {
            return Err(Error::invalid(format!(
                "KV-cache group {index} holds a state and has block size {}, expected 1: a state has no token positions",
                group.block_size
            )));
        }
        if matches!(group.kind, GroupKind::SlidingWindow { window: 0 } | GroupKind::Chunked { chunk: 0 }) {
            return Err(Error::invalid(format!("KV-cache group {index} has a {}, expected at least 1", group.kind)));
        }
        check_share(index, group)?;
    }
    let mut names = HashSet::with_capacity(geometry.areas.len());
    let mut all_runs = 0u64;
    for area in &geometry.areas {
        check_area(area, geometry, regions)?;
        if !names.insert((&*area.layer, &*area.part)) {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("{area} is in the geometry twice; a rank holds every layer and part once"),
            ));
        }
        // Whoever reads K or V of it would find it in two places.
        let packed_and_apart = match &*area.part {
            "kv" => ["k", "v"].into_iter().find(|part| names.contains(&(&*area.layer, *part))),
            "k" | "v" => names.contains(&(&*area.layer, "kv")).then_some("kv"),
            _ => None,
        };
        if let Some(other) = packed_and_apart {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("{area} is in the geometry beside part {other:?} of that layer; a rank holds K and V once"),
            ));
        }
        all_runs = all_runs.saturating_add(runs(area.content, area.axes()));
        if all_runs > MAX_RUNS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!(
                    "the geometry falls apart into more than {MAX_RUNS} contiguous runs per block; use a layout that \
                     keeps a head's or a token's bytes together (of a convolution's state: vLLM's SD)"
                ),
            ));
        }
    }
    Ok(())
}

fn check_share(index: usize, group: &Group) -> Result<()> {
    let Group { block_size, token_ranks, token_rank, token_interleave, .. } = *group;
    if token_ranks == 0 || token_ranks > MAX_AXIS || token_rank >= token_ranks {
        return Err(Error::invalid(format!(
            "KV-cache group {index}: the tokens are dealt over {token_ranks} ranks, of which this is number {token_rank}; \
             expected 1 to {MAX_AXIS} ranks and a number below that"
        )));
    }
    if token_interleave == 0 || !block_size.is_multiple_of(token_interleave) {
        return Err(Error::invalid(format!(
            "KV-cache group {index}: {token_interleave} consecutive tokens go to a rank, expected a divisor of the \
             block size, {block_size}"
        )));
    }
    if group.kind == GroupKind::State && token_ranks != 1 {
        return Err(Error::invalid(format!(
            "KV-cache group {index} holds a state, which has no tokens that {token_ranks} ranks could share out"
        )));
    }
    Ok(())
}

fn check_area(area: &Area, geometry: &Geometry, regions: &[RegionMetadata]) -> Result<()> {
    if area.layer.is_empty() || area.layer.len() > MAX_LAYER_BYTES {
        return Err(Error::invalid(format!(
            "a layer name has 1 to {MAX_LAYER_BYTES} bytes, this one has {}",
            area.layer.len()
        )));
    }
    if area.part.is_empty() || area.part.len() > MAX_PART_BYTES {
        return Err(Error::invalid(format!(
            "layer {:?}: a part name has 1 to {MAX_PART_BYTES} bytes, this one has {}",
            area.layer,
            area.part.len()
        )));
    }
    if area.format.len() > MAX_PART_BYTES {
        return Err(Error::invalid(format!(
            "{area} has a format of {} bytes, at most {MAX_PART_BYTES} can be",
            area.format.len()
        )));
    }
    if area.group as usize >= geometry.groups.len() {
        return Err(Error::invalid(format!(
            "{area} names KV-cache group {}, the geometry has {}",
            area.group,
            geometry.groups.len()
        )));
    }
    let Some(region) = regions.get(area.region as usize) else {
        return Err(Error::invalid(format!(
            "{area} names region {}, the agent exports {}; register the memory first",
            area.region,
            regions.len()
        )));
    };
    let counts = [
        ("num_blocks", area.num_blocks),
        ("heads", area.heads),
        ("pages", area.pages),
        ("tokens", area.tokens),
        ("units", area.units),
    ];
    let sizes = [("content", area.content), ("block_stride", area.block_stride)];
    let sizes = sizes.into_iter().chain([
        // With one head, page, token or unit its stride is never used.
        ("head_stride", if area.heads > 1 { area.head_stride } else { 1 }),
        ("page_stride", if area.pages > 1 { area.page_stride } else { 1 }),
        ("token_stride", if area.tokens > 1 { area.token_stride } else { 1 }),
        ("unit_stride", if area.units > 1 { area.unit_stride } else { 1 }),
    ]);
    if let Some((name, _)) = counts.map(|(n, v)| (n, u64::from(v))).into_iter().chain(sizes).find(|&(_, v)| v == 0) {
        return Err(Error::invalid(format!("{area} has {name} 0, expected at least 1")));
    }
    for (name, value) in [
        ("heads", area.total_heads),
        ("pages", area.pages),
        ("tokens", area.tokens),
        ("tokens per block", area.positions()),
        ("units", area.units),
    ] {
        if value > MAX_AXIS {
            return Err(Error::new(
                ErrorKind::Exhausted,
                format!("{area} has {value} {name}, at most {MAX_AXIS} can be"),
            ));
        }
    }
    if area.first_head.checked_add(area.heads).is_none_or(|end| end > area.total_heads) {
        return Err(Error::invalid(format!(
            "{area} holds {} heads from head {}, the model has {}",
            area.heads, area.first_head, area.total_heads
        )));
    }
    check_positions(area, geometry)?;
    let (run, _) = folded(area.content, area.axes());
    if area.end().is_none_or(|end| end > region.len) {
        let end = area.end().map_or("beyond 64 bits".into(), |end| format!("at byte {end}"));
        return Err(Error::new(
            ErrorKind::OutOfRange,
            format!(
                "{area} ends {end} of region {}, which has {} bytes (offset {}, {} blocks with stride {}, {} heads with \
                 stride {}, {} pages with stride {}, {} tokens with stride {}, {} units with stride {}, content {})",
                area.region,
                region.len,
                area.offset,
                area.num_blocks,
                area.block_stride,
                area.heads,
                area.head_stride,
                area.pages,
                area.page_stride,
                area.tokens,
                area.token_stride,
                area.units,
                area.unit_stride,
                area.content
            ),
        ));
    }
    if run > area.block_stride {
        return Err(Error::invalid(format!(
            "{area} has {run} contiguous bytes in a block and block stride {}: blocks would lie on each other",
            area.block_stride
        )));
    }
    Ok(())
}

/// The token positions must be those of the group's blocks.
fn check_positions(area: &Area, geometry: &Geometry) -> Result<()> {
    let Some(group) = geometry.groups.get(area.group as usize) else { return Ok(()) };
    let whole = area.positions() == 1;
    if group.kind == GroupKind::State || whole || area.positions() == group.block_size {
        return Ok(());
    }
    Err(Error::invalid(format!(
        "{area} has {} pages of {} tokens per block, but KV-cache group {} has blocks of {} tokens; the two must be the \
         same number, or 1 page of 1 token for blocks that can only move whole",
        area.pages, area.tokens, area.group, group.block_size
    )))
}
