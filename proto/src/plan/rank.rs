//! The plan between two ranks.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::block_grid::{BlockGrid, TokenRun};
use super::holding::unpacked;
use super::template::{self, AreaPair, BlockStrides, PartsDiffer};
use super::{Cell, Segment};
use crate::error::{Error, ErrorKind, Result};
use crate::geometry::{Area, Geometry, Group, GroupKind, MAX_RUNS};
use crate::wire::RankMetadata;

const SAME_CACHE: &str = "start both engines with the same model, cache dtype and attention backend";

fn differs(field: &str, local: impl fmt::Display, remote: impl fmt::Display, remedy: &str) -> Error {
    Error::new(ErrorKind::Incompatible, format!("{field} differs: {local} here, {remote} on the other side; {remedy}"))
}

/// The areas of a layer, sorted by part.
type LayerAreas<'a> = &'a [(&'a str, &'a str, &'a Area)];

fn part<'a>(parts: LayerAreas<'a>, name: &str) -> Option<&'a Area> {
    let at = parts.binary_search_by(|(_, part, _)| (*part).cmp(name)).ok()?;
    parts.get(at).map(|(.., area)| *area)
}

/// Bytes per token and head of a layer's K and V together. Saturates.
fn k_and_v_bytes(parts: LayerAreas<'_>) -> Option<u64> {
    let bytes = |name| part(parts, name).map(Area::token_bytes);
    bytes("kv").or_else(|| Some(bytes("k")?.saturating_add(bytes("v")?)))
}

/// A rank's metadata with its areas in order, to be set beside many other ranks.
pub struct RankIndex<'a> {
    metadata: &'a RankMetadata,
    /// Layer, part and area, sorted.
    areas: Vec<(&'a str, &'a str, &'a Area)>,
}

impl<'a> RankIndex<'a> {
    /// Indexes a rank's metadata, which may still be inconsistent.
    pub fn new(metadata: &'a RankMetadata) -> Self {
        let mut areas: Vec<_> = metadata.geometry.areas.iter().map(|area| (&*area.layer, &*area.part, area)).collect();
        areas.sort_by_key(|(layer, part, _)| (*layer, *part));
        RankIndex { metadata, areas }
    }

    /// The areas of a layer; empty if the rank has no such layer.
    fn layer(&self, name: &str) -> LayerAreas<'_> {
        let from = self.areas.partition_point(|(layer, ..)| *layer < name);
        first_layer(self.areas.get(from..).unwrap_or_default())
            .filter(|(layer, _)| *layer == name)
            .unwrap_or_default()
            .1
    }

    /// [`check_ranks`], with this rank as the local one.
    pub fn check(&self, remote: &RankIndex<'_>) -> Result<()> {
        let geometries = (&self.metadata.geometry, &remote.metadata.geometry);
        let (mut ours, mut theirs) = (&*self.areas, &*remote.areas);
        while let (Some((layer, here)), Some((other, there))) = (first_layer(ours), first_layer(theirs)) {
            if layer == other {
                for name in here.iter().flat_map(|(_, part, _)| unpacked(part)) {
                    check_part((layer, name), (0, 0), (geometries.0, here), (geometries.1, there))?;
                }
            }
            if layer <= other {
                ours = ours.get(here.len()..).unwrap_or_default();
            }
            if other <= layer {
                theirs = theirs.get(there.len()..).unwrap_or_default();
            }
        }
        Ok(())
    }
}

/// The name of the first layer, and what there is of it.
fn first_layer<'a>(areas: LayerAreas<'a>) -> Option<(&'a str, LayerAreas<'a>)> {
    let (name, ..) = *areas.first()?;
    let len = areas.iter().take_while(|(layer, ..)| *layer == name).count();
    areas.get(..len).map(|parts| (name, parts))
}

/// Checks that one rank's layers can be copied to the other's. Compares kinds of cache, heads of the layer, bytes per
/// token and head. What they hold of it may differ, and so may regions, offsets, strides, block sizes and numbers of
/// blocks. Neither geometry is checked against its own regions: [`Geometry::validate`].
///
/// Errors: [`ErrorKind::Incompatible`] naming the field, both values and the remedy.
pub fn check_ranks(local: &RankMetadata, remote: &RankMetadata) -> Result<()> {
    RankIndex::new(local).check(&RankIndex::new(remote))
}

/// The areas that `heads` of a part of a layer are copied between, if they fit each other. None if those of `k` stand for
/// them, or if a side has no such group.
fn check_part<'a>(
    (layer, name): (&str, &str),
    heads: (u32, u32),
    (local, here): (&Geometry, LayerAreas<'a>),
    (remote, there): (&Geometry, LayerAreas<'a>),
) -> Result<Option<AreaPair<'a>>> {
    let parts = |parts: LayerAreas<'_>| parts.iter().map(|(_, part, _)| *part).collect::<Vec<_>>().join("+");
    // Where one side packs K and V, what the other has of them must be all of it.
    let one_packs = part(here, "kv").is_some() != part(there, "kv").is_some();
    if one_packs
        && let (Some(a), Some(b)) = (k_and_v_bytes(here), k_and_v_bytes(there))
        && a != b
    {
        return Err(differs(&format!("bytes per token and head of layer {layer:?}"), a, b, SAME_CACHE));
    }
    let layouts = || differs(&format!("layout of layer {layer:?}"), parts(here), parts(there), SAME_CACHE);
    let pair = template::pair(name, heads, |name| part(here, name), |name| part(there, name));
    let Some(pair) = pair.map_err(|PartsDiffer| layouts())? else { return Ok(None) };
    let (l, r) = (&*pair.local, &*pair.remote);
    let (Some(own), Some(other)) = (group_of(local, l), group_of(remote, r)) else { return Ok(None) };
    if own.kind != other.kind {
        return Err(differs(&format!("kind of cache of {l}"), own.kind, other.kind, SAME_CACHE));
    }
    let whole = |area: &Area, group: &Group| area.positions() == 1 && group.block_size > 1;
    let moves_whole = whole(l, own) || whole(r, other);
    if moves_whole && (own.block_size, own.token_ranks) != (other.block_size, other.token_ranks) {
        return Err(differs(
            &format!("block size of {l}, whose attention backend keeps tokens in an order of its own,"),
            own.block_size,
            other.block_size,
            "start both engines with the same block size, or with another attention backend",
        ));
    }
    if moves_whole && own.token_ranks > 1 && own.token_interleave != other.token_interleave {
        return Err(differs(
            &format!("consecutive tokens per rank of {l}"),
            own.token_interleave,
            other.token_interleave,
            "start both engines with the same interleaving of decode context parallelism",
        ));
    }
    // Nobody knows where in such a block K ends and V begins.
    if moves_whole && one_packs {
        return Err(layouts());
    }
    if own.kind == GroupKind::State || moves_whole {
        let (a, b) = (l.positions(), r.positions());
        if a != b {
            return Err(differs(&format!("positions per block of {l}"), a, b, SAME_CACHE));
        }
    }
    if !l.format.is_empty() && !r.format.is_empty() && l.format != r.format {
        let quoted = |area: &Area| format!("{:?}", area.format);
        return Err(differs(&format!("format of {l}"), quoted(l), quoted(r), SAME_CACHE));
    }
    if (l.heads_by_rank || r.heads_by_rank) && l.total_heads != r.total_heads {
        return Err(Error::new(
            ErrorKind::Incompatible,
            format!(
                "how the KV heads of {l} are shared out over tensor-parallel ranks is not known: {} shards here, {} on the \
                 other side; start both engines with the same --tensor-parallel-size",
                l.total_heads, r.total_heads
            ),
        ));
    }
    for (field, a, b) in [
        ("number of KV heads of the model", u64::from(l.total_heads), u64::from(r.total_heads)),
        ("bytes per token and head", l.token_bytes(), r.token_bytes()),
    ] {
        if a != b {
            return Err(differs(&format!("{field} of {l}"), a, b, SAME_CACHE));
        }
    }
    if !template::units_fit(l, r) {
        return Err(differs(
            &format!("runs per token of {l}"),
            format_args!("{} of {} bytes", l.units, l.content),
            format_args!("{} of {} bytes", r.units, r.content),
            SAME_CACHE,
        ));
    }
    Ok(Some(pair))
}

fn group_of<'a>(geometry: &'a Geometry, area: &Area) -> Option<&'a Group> {
    geometry.groups.get(area.group as usize)
}

/// A local and a remote KV-cache group that have layers in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GroupPair {
    pub(super) local: u32,
    pub(super) remote: u32,
    pub(super) local_group: Group,
    pub(super) remote_group: Group,
    pub(super) grid: BlockGrid,
    /// Block ids of the groups are below these.
    pub(super) local_bound: u32,
    pub(super) remote_bound: u32,
    /// The list in whose ids a sub-block counts as a block, if any segment uses it.
    pub(super) fine: Option<FineList>,
    /// The list of each phase that has segments.
    pub(super) phases: BTreeMap<u64, u32>,
    /// True if some area keeps a block's tokens in an order of its own.
    pub(super) whole: bool,
    /// The areas to copy, for the edges of requests that start inside a grain.
    pub(super) pairs: Vec<OwnedAreaPair>,
}

/// A list of sub-blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FineList {
    pub(super) list: u32,
    /// True if blocks merge, so that their order matters.
    pub(super) dense: bool,
}

/// A [`AreaPair`] that owns its areas, which have no names there: a request's errors name none, and the names of all layers of
/// all ranks were a sixth of the time to plan with an engine of 64 ranks.
pub(super) type OwnedAreaPair = AreaPair<'static>;

fn owned(pair: &AreaPair<'_>) -> OwnedAreaPair {
    use std::borrow::Cow;
    AreaPair {
        local: Cow::Owned(pair.local.nameless()),
        remote: Cow::Owned(pair.remote.nameless()),
        first_head: pair.first_head,
        heads: pair.heads,
    }
}

/// Bytes between neighbouring sub-blocks of an area, if they are evenly spaced through all blocks: then sub-block `s` of
/// block `b` is where block `b * subs + s` would be.
fn even(area: &Area, group: &Group, subs: u64) -> Option<u64> {
    if subs == 1 {
        return Some(area.block_stride);
    }
    let stride = area.block_stride / subs;
    let positions = u64::from(group.block_size) / subs;
    let paged = area.pages == 1 || area.page_stride == area.token_stride.checked_mul(area.tokens.into())?;
    let exact = stride.checked_mul(subs) == Some(area.block_stride)
        && positions.checked_mul(subs) == Some(group.block_size.into())
        && area.token_stride.checked_mul(positions) == Some(stride);
    (exact && paged && group.token_ranks == 1).then_some(stride)
}

/// The rank that reads; it is planned against many remote ranks.
pub struct LocalRank<'a> {
    index: RankIndex<'a>,
    /// See [`RankPlan::shared`].
    shared: Arc<[(u32, u32)]>,
}

impl<'a> LocalRank<'a> {
    /// Errors: those of [`Geometry::validate`].
    pub fn new(metadata: &'a RankMetadata) -> Result<Self> {
        let shared = metadata.geometry.shared_groups(&metadata.agent.regions);
        let shared = shared.map_err(|e| e.context(format_args!("the geometry of this rank {}", metadata.rank)))?;
        Ok(LocalRank { index: RankIndex::new(metadata), shared: shared.into() })
    }

    /// As [`RankPlan::new`], with a `remote` that [`RankMetadata::validate`] has found to be right in itself.
    pub fn plan(&self, remote: &RankMetadata, cells: &[Cell]) -> Result<RankPlan> {
        let local = self.index.metadata;
        let there = RankIndex::new(remote);
        let mut by_groups: BTreeMap<(u32, u32), Vec<AreaPair<'_>>> = BTreeMap::new();
        // The parts of a layer come one after the other.
        let mut layer: (&str, LayerAreas<'_>, LayerAreas<'_>) = ("", &[], &[]);
        for cell in cells {
            if cell.layer != layer.0 {
                layer = (&cell.layer, self.index.layer(&cell.layer), there.layer(&cell.layer));
            }
            let (name, here, there) = layer;
            let heads = (cell.first_head, cell.heads);
            let pair = check_part((name, &cell.part), heads, (&local.geometry, here), (&remote.geometry, there))?;
            if let Some(pair) = pair {
                check_heads(&pair)?;
                by_groups.entry((pair.local.group, pair.remote.group)).or_default().push(pair);
            }
        }
        let mut builder = Builder::default();
        for ((l, r), pairs) in &by_groups {
            builder.add(*l, *r, pairs, &local.geometry, &remote.geometry)?;
        }
        let segments = template::merged(builder.segments);
        for fine in builder.pairs.iter_mut().filter_map(|pair| pair.fine.as_mut()) {
            fine.dense = segments.iter().any(|s| s.list == fine.list && s.is_dense());
        }
        Ok(RankPlan {
            segments: segments.into(),
            pairs: builder.pairs.into(),
            lists: builder.lists,
            local_groups: local.geometry.groups.len(),
            remote_groups: remote.geometry.groups.len(),
            shared: Arc::clone(&self.shared),
        })
    }
}

/// The copy between this rank and one remote rank, for any request. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankPlan {
    pub(super) segments: Arc<[Segment]>,
    pub(super) pairs: Arc<[GroupPair]>,
    /// How many lists the segments use.
    pub(super) lists: u32,
    /// How many KV-cache groups either side has.
    pub(super) local_groups: usize,
    pub(super) remote_groups: usize,
    /// Pairs of groups whose local blocks share memory, so that the same id in both would be written twice.
    pub(super) shared: Arc<[(u32, u32)]>,
}

impl RankPlan {
    /// The plan for reading `cells` from `remote` on the rank `local`, as [`super::assign`] gives them. Both geometries
    /// are checked against their own regions first.
    ///
    /// Errors: [`ErrorKind::Incompatible`] naming the field that differs, both values and the remedy; what
    /// [`Geometry::validate`] gives for a geometry that is wrong in itself.
    pub fn new(local: &RankMetadata, remote: &RankMetadata, cells: &[Cell]) -> Result<RankPlan> {
        let local = LocalRank::new(local)?;
        remote
            .geometry
            .validate(&remote.agent.regions)
            .map_err(|e| e.context(format_args!("the geometry of rank {} of engine {}", remote.rank, remote.engine)))?;
        local.plan(remote, cells)
    }

    /// The runs that repeat at every block, or at every block's part of a phase.
    pub fn segments(&self) -> &Arc<[Segment]> {
        &self.segments
    }
}

fn check_heads(pair: &AreaPair<'_>) -> Result<()> {
    for area in [&*pair.local, &*pair.remote] {
        let end = area.first_head.saturating_add(area.heads);
        if pair.first_head < area.first_head || pair.first_head.saturating_add(pair.heads) > end {
            return Err(Error::new(
                ErrorKind::Incompatible,
                format!(
                    "{area} holds heads {} to {end}, without the {} from {} that are to be copied",
                    area.first_head, pair.heads, pair.first_head
                ),
            ));
        }
    }
    Ok(())
}

#[derive(Default)]
struct Builder {
    segments: Vec<Segment>,
    pairs: Vec<GroupPair>,
    lists: u32,
    runs: u64,
}

impl Builder {
    fn list(&mut self) -> u32 {
        self.lists += 1;
        self.lists - 1
    }

    fn grow(&mut self, by: u64) -> Result<()> {
        self.runs = self.runs.saturating_add(by);
        if self.runs <= MAX_RUNS {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Incompatible,
            format!(
                "the layouts and block sizes here and on the other side have so little in common that they fall apart \
                 into more than {MAX_RUNS} different runs; start both engines with the same attention backend and \
                 KV-cache layout (of a convolution's state, too), or with block sizes of which one divides the other"
            ),
        ))
    }

    fn add(&mut self, l: u32, r: u32, pairs: &[AreaPair<'_>], local: &Geometry, remote: &Geometry) -> Result<()> {
        let (Some(local_group), Some(remote_group)) = (local.groups.get(l as usize), remote.groups.get(r as usize))
        else {
            return Ok(());
        };
        let grid = BlockGrid::new(local_group, remote_group);
        let mut group = GroupPair {
            local: l,
            remote: r,
            local_group: local_group.clone(),
            remote_group: remote_group.clone(),
            grid,
            local_bound: local.num_blocks(l).unwrap_or(0),
            remote_bound: remote.num_blocks(r).unwrap_or(0),
            fine: None,
            phases: BTreeMap::new(),
            whole: false,
            pairs: pairs.iter().map(owned).collect(),
        };
        let first_phase = grid.runs(local_group, remote_group, 0, 0..grid.grain);
        for pair in pairs {
            let (la, ra) = (&*pair.local, &*pair.remote);
            if local_group.kind == GroupKind::State || la.positions() == 1 && local_group.block_size > 1 {
                group.whole = true;
                let run = [TokenRun { local: 0, remote: 0, count: la.positions().into() }];
                let list = self.fine(&mut group);
                let steps = BlockStrides { list, local: la.block_stride, remote: ra.block_stride };
                self.extend(pair, &run, steps)?;
                continue;
            }
            let even = (even(la, local_group, grid.local_subs), even(ra, remote_group, grid.remote_subs));
            if let (Some(local_step), Some(remote_step)) = even {
                let list = self.fine(&mut group);
                let steps = BlockStrides { list, local: local_step, remote: remote_step };
                self.extend(pair, &first_phase, steps)?;
                continue;
            }
            self.grow(grid.phases())?;
            for phase in 0..grid.phases() {
                let runs = grid.runs(local_group, remote_group, phase, 0..grid.grain);
                if runs.is_empty() {
                    continue;
                }
                let list = match group.phases.get(&phase) {
                    Some(list) => *list,
                    None => {
                        let list = self.list();
                        group.phases.insert(phase, list);
                        list
                    }
                };
                let steps = BlockStrides { list, local: la.block_stride, remote: ra.block_stride };
                self.extend(pair, &runs, steps)?;
            }
        }
        self.pairs.push(group);
        Ok(())
    }

    fn fine(&mut self, group: &mut GroupPair) -> u32 {
        match group.fine {
            Some(fine) => fine.list,
            None => {
                let list = self.list();
                group.fine = Some(FineList { list, dense: false });
                list
            }
        }
    }

    fn extend(&mut self, pair: &AreaPair<'_>, runs: &[TokenRun], steps: BlockStrides) -> Result<()> {
        self.grow(template::runs(pair, runs))?;
        self.segments.extend(template::intersect(pair, runs, steps));
        Ok(())
    }
}
