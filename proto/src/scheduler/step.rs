//! Steps that are handed out encoded: as much of what is queued as one message holds, the rest with the next step.

use crate::error::{Error, ErrorKind, Result};
use crate::wire::{self, Message, StepMetadata};

/// Encodes the longest beginning of `queue`, by halves, that takes at most `most` bytes, and leaves the rest in it. On an
/// error all of it is still there.
///
/// A piece of work that fits no message alone would block the queue for ever, so the code that queues one bounds it.
pub(super) fn take(queue: &mut StepMetadata, most: usize) -> Result<Vec<u8>> {
    let mut rest = StepMetadata::default();
    loop {
        match encode(queue, most) {
            Ok(bytes) => {
                *queue = rest;
                return Ok(bytes);
            }
            Err(error) => {
                let pieces = count(queue);
                if pieces < 2 {
                    append(queue, rest);
                    return Err(error);
                }
                let mut second = split_off(queue, pieces / 2);
                append(&mut second, rest);
                rest = second;
            }
        }
    }
}

fn encode(step: &StepMetadata, most: usize) -> Result<Vec<u8>> {
    let bytes = wire::encode(StepMetadata::KIND, StepMetadata::OLDEST, step)?;
    if bytes.len() > most {
        return Err(Error::new(
            ErrorKind::Exhausted,
            format!("a step of {} bytes is over the limit of {most}", bytes.len()),
        ));
    }
    Ok(bytes)
}

/// Returns the number of pieces of work; all that the engine's ranks hold counts as one.
fn count(step: &StepMetadata) -> usize {
    let StepMetadata { grants, dropped, holds, loads, releases, aborts, engine } = step;
    let lists = [grants.len(), dropped.len(), holds.len(), loads.len(), releases.len(), aborts.len()];
    lists.into_iter().sum::<usize>() + usize::from(!engine.is_empty())
}

/// Leaves the first `pieces` in `step`, in the order in which workers do them, and returns the others. So a piece is never
/// handed out before one that it refers to: an abort not before its load.
fn split_off(step: &mut StepMetadata, pieces: usize) -> StepMetadata {
    fn cut<T>(list: &mut Vec<T>, left: &mut usize) -> Vec<T> {
        let kept = list.len().min(*left);
        *left -= kept;
        list.split_off(kept)
    }
    let mut left = pieces.saturating_sub(usize::from(!step.engine.is_empty()));
    StepMetadata {
        grants: cut(&mut step.grants, &mut left),
        dropped: cut(&mut step.dropped, &mut left),
        holds: cut(&mut step.holds, &mut left),
        loads: cut(&mut step.loads, &mut left),
        releases: cut(&mut step.releases, &mut left),
        aborts: cut(&mut step.aborts, &mut left),
        engine: Vec::new(),
    }
}

/// Adds later pieces of the same queue.
fn append(step: &mut StepMetadata, later: StepMetadata) {
    let StepMetadata { grants, dropped, holds, loads, releases, aborts, engine } = later;
    step.grants.extend(grants);
    step.dropped.extend(dropped);
    step.holds.extend(holds);
    step.loads.extend(loads);
    step.releases.extend(releases);
    step.aborts.extend(aborts);
    step.engine.extend(engine);
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::ids::{EngineId, RankId, RequestId};
    use crate::plan::Holding;
    use crate::wire::{Blocks, Grant, Hold, Load, Release, Remote};

    fn id(name: &str) -> RequestId {
        RequestId::new(name).unwrap()
    }

    fn remote() -> Remote {
        Remote {
            engine: EngineId::new("p").unwrap(),
            incarnation: None,
            request: id("p"),
            host: "h".into(),
            port: 1,
            lease_ms: 1,
            lease_id: 0,
            shared: false,
        }
    }

    fn load(name: &str, blocks: usize) -> Load {
        Load {
            request: id(name),
            remote: remote(),
            local_blocks: vec![Blocks::from(vec![7; blocks])],
            remote_blocks: vec![],
            tokens: (0, 1),
            remote_tokens: 1,
            awaits: false,
            null_block: None,
            window_only: false,
            refused: None,
        }
    }

    fn queue() -> StepMetadata {
        let grant = |name| Grant { request: id(name), lease_ms: 1, lease_id: 1, name: None, history: false };
        StepMetadata {
            grants: vec![grant("g1"), grant("g2")],
            dropped: vec![id("d")],
            holds: vec![Hold { request: id("h"), remote: remote() }],
            loads: ["l1", "l2", "l3", "l4"].map(|name| load(name, 1000)).into(),
            releases: vec![Release { request: id("h"), remote: remote() }],
            aborts: vec![id("l4"), id("l1")],
            engine: vec![Holding { rank: RankId { pp: 0, tp: 0 }, groups: vec![], parts: vec![] }],
        }
    }

    #[test]
    fn what_is_queued_is_handed_out_whole_and_in_order_in_as_many_steps_as_it_needs() {
        let whole = queue();
        let all = encode(&whole, usize::MAX).unwrap().len();
        let mut steps = Vec::new();
        for most in [all, all - 1, all / 2, 5000] {
            let (mut queue, mut joined) = (whole.clone(), StepMetadata::default());
            let mut taken = 0;
            while !queue.is_empty() {
                let bytes = take(&mut queue, most).unwrap();
                assert!(bytes.len() <= most);
                let step = StepMetadata::from_bytes(&bytes).unwrap();
                // An abort or a release comes with what it refers to, or after it.
                assert!(step.aborts.is_empty() || queue.loads.is_empty());
                assert!(step.releases.is_empty() || queue.holds.is_empty());
                append(&mut joined, step);
                taken += 1;
            }
            assert_eq!(joined, whole);
            steps.push(taken);
        }
        assert_eq!(steps.first(), Some(&1));
        assert!(steps.is_sorted() && steps.last() > Some(&3), "{steps:?}");
    }

    #[test]
    fn an_error_takes_nothing() {
        let mut queue = queue();
        assert_eq!(take(&mut queue, 50).unwrap_err().kind(), ErrorKind::Exhausted);
        assert_eq!(queue, self::queue());
    }
}
