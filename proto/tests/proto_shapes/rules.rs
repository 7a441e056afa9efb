//! Single rules by example: who reads from whom, where a request begins and ends, and what windows leave out.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_proto::ErrorKind;
use kvferry_proto::RankId;
use kvferry_proto::geometry::GroupKind;
use kvferry_proto::plan::{RankPlan, Share, Wanted, assign};
use kvferry_proto::shape::{EngineSpec, GroupSpec, Layout, ModelSpec};
use kvferry_proto::wire::Blocks;

use crate::Engine;

fn engine(tp: u32, pp: u32, dcp: u32, model: &ModelSpec) -> Engine {
    Engine::new(&EngineSpec { tp, pp, dcp, block_size: vec![4], num_blocks: 4, ..EngineSpec::default() }, model)
}

fn gqa(heads: u32) -> ModelSpec {
    ModelSpec { groups: vec![GroupSpec::attention(GroupKind::Full, 0..4, heads, 8, 8)] }
}

fn mla() -> ModelSpec {
    ModelSpec { groups: vec![GroupSpec::latent(0..4, 8)] }
}

type Shares = BTreeMap<RankId, BTreeMap<RankId, Share>>;

fn shares(consumer: &Engine, producer: &Engine, spread: u64) -> Shares {
    let of = |rank: RankId| assign(rank, &consumer.holdings, &producer.holdings, spread).unwrap();
    let shares: Shares = consumer.ranks.iter().map(|rank| (rank.rank, of(rank.rank))).collect();
    crate::check_readers(&shares, producer).unwrap();
    shares
}

/// Per consumer rank, the (pp, tp) of the producer ranks that it reads from.
fn read_from(shares: &Shares) -> Vec<Vec<(u32, u32)>> {
    let read = |all: &BTreeMap<RankId, Share>| {
        all.iter().filter(|(_, share)| !share.cells.is_empty()).map(|(rank, _)| (rank.pp, rank.tp)).collect()
    };
    shares.values().map(read).collect()
}

/// Readers of each producer rank, in order.
fn readers(shares: &Shares) -> Vec<u32> {
    let all: BTreeMap<RankId, u32> = shares.values().flatten().map(|(rank, share)| (*rank, share.readers)).collect();
    all.into_values().collect()
}

#[test]
fn ranks_read_from_those_that_hold_their_heads() {
    let case = |d: (u32, u32, u32), p: (u32, u32, u32), heads| {
        let model = gqa(heads);
        let shares = shares(&engine(d.0, d.1, d.2, &model), &engine(p.0, p.1, p.2, &model), 0);
        (read_from(&shares), readers(&shares))
    };
    assert_eq!(case((1, 1, 1), (4, 1, 1), 4), (vec![vec![(0, 0), (0, 1), (0, 2), (0, 3)]], vec![1; 4]));
    assert_eq!(case((4, 1, 1), (1, 1, 1), 4), (vec![vec![(0, 0)]; 4], vec![4]));
    // 6 heads: 3 + 3 to 2 + 2 + 2.
    let thirds = vec![vec![(0, 0)], vec![(0, 0), (0, 1)], vec![(0, 1)]];
    assert_eq!(case((3, 1, 1), (2, 1, 1), 6), (thirds, vec![2, 2]));
    // Stages of 2 + 2 layers to stages of 1, 2 and 1.
    let stages = vec![vec![(0, 0)], vec![(0, 0), (1, 0)], vec![(1, 0)]];
    let model = gqa(1);
    let consumer = EngineSpec { pp: 3, stages: vec![1, 2, 1], ..EngineSpec::default() };
    let found = shares(&Engine::new(&consumer, &model), &engine(1, 2, 1, &model), 0);
    assert_eq!((read_from(&found), readers(&found)), (stages, vec![2, 2]));
    // Tokens that are dealt to two ranks come from both.
    assert_eq!(case((1, 1, 1), (2, 1, 2), 2), (vec![vec![(0, 0), (0, 1)]], vec![1, 1]));
    assert_eq!(case((2, 1, 2), (2, 1, 2), 2), (vec![vec![(0, 0)], vec![(0, 1)]], vec![1, 1]));
}

#[test]
fn copies_of_the_same_bytes_share_the_load() {
    let many = shares(&engine(4, 1, 1, &mla()), &engine(16, 1, 1, &mla()), 0);
    let read: Vec<Vec<(u32, u32)>> = read_from(&many);
    assert!(read.iter().all(|from| from.len() == 1), "{read:?}");
    assert_eq!(read.iter().flatten().collect::<BTreeSet<_>>().len(), 4, "{read:?}: one source for two");
    // The other twelve are told by one rank each, in turn.
    assert_eq!(readers(&many), [1; 16]);
    assert_eq!(many.values().map(BTreeMap::len).collect::<Vec<_>>(), [4; 4]);
    // More readers than copies: each copy serves the same number.
    assert_eq!(readers(&shares(&engine(16, 1, 1, &mla()), &engine(4, 1, 1, &mla()), 0)), [4; 4]);
    // One KV head on four ranks, read by two.
    let heads = shares(&engine(2, 1, 1, &gqa(1)), &engine(4, 1, 1, &gqa(1)), 0);
    assert_eq!(read_from(&heads).into_iter().flatten().collect::<BTreeSet<_>>().len(), 2);
    // Engines with other numbers choose other copies.
    let chosen = |spread| read_from(&shares(&engine(1, 1, 1, &mla()), &engine(4, 1, 1, &mla()), spread))[0].clone();
    assert_eq!((0..4).flat_map(chosen).collect::<BTreeSet<_>>().len(), 4);
}

fn blocks(ids: &[u32]) -> Vec<Blocks> {
    vec![ids.into()]
}

/// One layer of one head and 1 byte for K and V: `tokens` per block, 8 blocks.
fn single(kind: GroupKind, tokens: u32) -> Engine {
    let model = ModelSpec { groups: vec![GroupSpec::attention(kind, 0..1, 1, 1, 1)] };
    Engine::new(&EngineSpec { block_size: vec![tokens], num_blocks: 8, ..EngineSpec::default() }, &model)
}

fn plan_of(consumer: &Engine, producer: &Engine) -> RankPlan {
    let rank = RankId { pp: 0, tp: 0 };
    let shares = assign(rank, &consumer.holdings, &producer.holdings, 0).unwrap();
    RankPlan::new(&consumer.metadata[&rank], &producer.metadata[&rank], &shares[&rank].cells).unwrap()
}

/// The K bytes that are written, as (local place, remote place), in order: K lies before V in each block.
fn k_places(plan: &RankPlan, wanted: &Wanted<'_>, tokens: (u64, u64)) -> Vec<(u64, u64)> {
    let k = |at: u64, tokens: u64| at % (2 * tokens) < tokens;
    let copy = plan.request(wanted).unwrap();
    let mut places: Vec<(u64, u64)> =
        copy.expand(1).map(|op| (op.local_offset, op.remote_offset)).filter(|(l, _)| k(*l, tokens.0)).collect();
    assert!(places.iter().all(|(_, r)| k(*r, tokens.1)));
    places.sort_unstable();
    places
}

fn wanted<'a>(local: &'a [Blocks], remote: &'a [Blocks], tokens: (u64, u64), remote_tokens: u64) -> Wanted<'a> {
    Wanted { local, remote, tokens, remote_tokens, null_block: None, window_only: true }
}

#[test]
fn a_request_begins_at_its_token_and_ends_with_a_grain() {
    let plan = plan_of(&single(GroupKind::Full, 6), &single(GroupKind::Full, 4));
    // Tokens 7 to 9 of blocks of 6 from blocks of 4: the grain is 2, so token 9 comes along, and token 6 does not.
    let (local, remote) = (blocks(&[5]), blocks(&[3, 1, 2]));
    let places = k_places(&plan, &wanted(&local, &remote, (7, 9), 9), (6, 4));
    assert_eq!(places, [(61, 8 + 3), (62, 16), (63, 17)]);
    // The producer may hold more than is wanted.
    let more = blocks(&[3, 1, 2, 7]);
    assert_eq!(k_places(&plan, &wanted(&local, &more, (7, 9), 16), (6, 4)), places);
    // Nothing wanted, nothing copied.
    assert!(plan.request(&wanted(&local, &remote, (9, 9), 9)).unwrap().is_empty());
}

#[test]
fn a_window_needs_what_it_covers_and_no_more() {
    let kind = GroupKind::SlidingWindow { window: 3 };
    let plan = plan_of(&single(kind, 8), &single(kind, 2));
    // 12 tokens: the window is 9 to 11, which are in the consumer's block of tokens 8 to 15 and in the producer's blocks
    // of tokens 8, 9 and 10, 11. The producer's list ends with these; it holds its window only.
    let (local, remote) = (blocks(&[4]), blocks(&[6, 7]));
    let mut request = wanted(&local, &remote, (0, 12), 12);
    let all = [(64, 24), (65, 25), (66, 28), (67, 29)];
    assert_eq!(k_places(&plan, &request, (8, 2)), all);
    request.window_only = false;
    assert_eq!(k_places(&plan, &request, (8, 2)), all);
    // 14 tokens: the window is 11 to 13. The producer has dropped 8 and 9, which share a block with it here.
    let mut request = wanted(&local, &remote, (0, 14), 14);
    assert_eq!(k_places(&plan, &request, (8, 2)), [(66, 24), (67, 25), (68, 28), (69, 29)]);
    request.window_only = false;
    let error = plan.request(&request).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    for part in ["no block for local block 4", "tokens 8 to 10", "2 blocks of 2 tokens", "blocks here have 8"] {
        assert!(error.message().contains(part), "{error} does not say {part:?}");
    }
    // What the window itself covers must be there in any case.
    let one = blocks(&[7]);
    let request = wanted(&local, &one, (0, 14), 14);
    assert_eq!(plan.request(&request).unwrap_err().kind(), ErrorKind::InvalidArgument);
    // Blocks here that lie before the window stay as they are, though both sides have them.
    let (local, remote) = (blocks(&[1, 4]), blocks(&[0, 1, 2, 3, 4, 6, 7]));
    let places = k_places(&plan, &wanted(&local, &remote, (0, 14), 14), (8, 2));
    assert!(places.iter().all(|(l, _)| *l >= 64), "{places:?}");
    // A consumer that has part of the window already.
    let part = wanted(&local, &remote, (13, 14), 14);
    assert_eq!(k_places(&plan, &part, (8, 2)), [(69, 29)]);
}

#[test]
fn blocks_that_only_move_whole_move_from_their_first_token() {
    for kind in [GroupKind::Full, GroupKind::SlidingWindow { window: 5 }] {
        let model = ModelSpec { groups: vec![GroupSpec::attention(kind, 0..1, 1, 1, 1)] };
        let whole = EngineSpec { layout: Layout::Whole, block_size: vec![4], num_blocks: 8, ..EngineSpec::default() };
        let whole = Engine::new(&whole, &model);
        let plan = plan_of(&whole, &whole);
        let (local, remote) = (blocks(&[2, 3]), blocks(&[0, 5, 6]));
        assert_eq!(plan.request(&wanted(&local, &remote, (4, 11), 11)).unwrap().bytes(), 16);
        // From inside a block on.
        let error = plan.request(&wanted(&local, &remote, (7, 11), 11)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.message().contains("token 7, inside a block of 4 tokens"), "{error}");
    }
}

#[test]
fn a_state_is_that_of_the_last_block() {
    let part = kvferry_proto::shape::PartSpec { name: "ssm".into(), heads: 1, positions: 1, bytes: 4 };
    let model = ModelSpec { groups: vec![GroupSpec::state(0..1, vec![part])] };
    let engine = engine(1, 1, 1, &model);
    let plan = plan_of(&engine, &engine);
    let (local, remote) = (blocks(&[0, 2, 1, 0]), blocks(&[3]));
    let request = Wanted { null_block: Some(0), ..wanted(&local, &remote, (0, 9), 9) };
    let ops: Vec<_> = plan.request(&request).unwrap().expand(u64::MAX).collect();
    let found: Vec<_> = ops.iter().map(|op| (op.local_offset, op.remote_offset, op.len)).collect();
    assert_eq!(found, [(4, 12, 4)]);
    // Where one is missing, nothing would be copied and the load be called good.
    let (full, none, null) = (blocks(&[1]), blocks(&[]), blocks(&[0, 0]));
    for (local, remote, side) in
        [(&none, &full, "local"), (&null, &full, "local"), (&full, &none, "remote"), (&full, &null, "remote")]
    {
        let request = Wanted { null_block: Some(0), ..wanted(local, remote, (0, 9), 9) };
        let error = plan.request(&request).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = format!("KV-cache group 0: there is no {side} block for the state after 9 tokens");
        assert!(error.message().contains(&text), "{error}");
        assert!(plan.request(&Wanted { tokens: (9, 9), ..request }).unwrap().is_empty());
    }
}

#[test]
fn a_window_that_the_consumer_has_no_blocks_for_is_refused() {
    let window = Engine::new(
        &EngineSpec { block_size: vec![4], num_blocks: 16, ..EngineSpec::default() },
        &ModelSpec { groups: vec![GroupSpec::attention(GroupKind::SlidingWindow { window: 9 }, 0..1, 1, 1, 1)] },
    );
    let plan = plan_of(&window, &window);
    let remote = blocks(&[5, 6, 7, 8]);
    let request = |local: &[u32], tokens| {
        let local = blocks(local);
        let request = Wanted { null_block: Some(0), ..wanted(&local, &remote, tokens, 16) };
        plan.request(&request).map(|copy| copy.bytes()).map_err(|error| error.message().to_owned())
    };
    // After 16 tokens the next one looks at tokens 8 to 15, which are blocks 2 and 3; the last one, again, at token 7 too.
    assert_eq!(request(&[1, 2, 3, 4], (0, 16)), Ok(3 * 8));
    for enough in [&[0, 0, 3, 4][..], &[3, 4]] {
        assert_eq!(request(enough, (0, 16)), Ok(2 * 8), "{enough:?}");
    }
    for (short, text) in [
        (&[0, 0, 0, 4][..], "no local block at position 2"),
        (&[1, 2, 3, 0], "no local block at position 3"),
        (&[4], "begin behind token 8"),
        (&[], "begin behind token 8"),
    ] {
        let error = request(short, (0, 16)).unwrap_err();
        assert!(error.contains("KV-cache group 0") && error.contains(text), "{short:?}: {error}");
    }
    // What is there already need not be filled.
    assert_eq!(request(&[4], (12, 16)), Ok(8));
}
