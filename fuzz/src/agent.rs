//! What agents send each other: frame headers, hellos, pieces, and the order of messages.

use kvferry::fuzzing;

use super::Source;

/// The first byte chooses the decoder.
pub fn run(data: &[u8]) {
    let mut source = Source::new(data);
    match source.below(4) {
        0 => fuzzing::frame(source.rest()),
        1 => fuzzing::hello(source.rest()),
        2 => fuzzing::pieces(source.rest()),
        _ => {
            let mut numbers = Vec::new();
            while !source.is_empty() && numbers.len() < 20_000 {
                let from = source.number();
                let count = if source.rarely(8) { source.short() % 5000 } else { 1 };
                numbers.extend((0..u64::from(count)).map(|n| from.saturating_add(n)));
            }
            fuzzing::inbox(&numbers);
        }
    }
}
