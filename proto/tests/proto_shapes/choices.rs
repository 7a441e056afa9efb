//! Random choices that can be replayed and made simpler.

/// A source of choices: random ones that it keeps, or given ones followed by zeros.
pub struct Choices {
    made: Vec<u64>,
    at: usize,
    random: Option<u64>,
}

/// SplitMix64: every bit of the result depends on every bit of the state.
pub fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Choices {
    pub fn random(seed: u64) -> Choices {
        Choices { made: Vec::new(), at: 0, random: Some(seed) }
    }

    fn given(made: Vec<u64>) -> Choices {
        Choices { made, at: 0, random: None }
    }

    /// A number below `bound`; 0 is the simplest.
    pub fn below(&mut self, bound: u64) -> u64 {
        let bound = bound.max(1);
        if let Some(state) = &mut self.random {
            let choice = mix(state) % bound;
            self.made.push(choice);
            return choice;
        }
        self.at += 1;
        self.made.get(self.at - 1).copied().unwrap_or(0) % bound
    }

    /// A number from `from` to `to`, both included.
    pub fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to.saturating_sub(from) + 1)
    }

    /// True once in `times`.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == times - 1
    }

    /// One of `items`; the first is the simplest.
    pub fn one_of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len() as u64) as usize]
    }
}

/// Makes the choices of a failing case simpler as long as it still fails: leaves out the end, puts 0 or half in place of
/// each. Gives the simplest failing case's choices.
pub fn simplify(seed: u64, fails: impl Fn(&mut Choices) -> bool) -> Choices {
    let mut first = Choices::random(seed);
    fails(&mut first);
    let mut best = first.made;
    let still = |made: &[u64]| fails(&mut Choices::given(made.to_vec()));
    let mut progress = true;
    while progress {
        progress = false;
        let mut cut = best.len() / 2;
        while cut > 0 && !best.is_empty() {
            let shorter = &best[..best.len().saturating_sub(cut)];
            if still(shorter) {
                best = shorter.to_vec();
                progress = true;
            } else {
                cut /= 2;
            }
        }
        for index in 0..best.len() {
            for simpler in [0, best[index] / 2, best[index].saturating_sub(1)] {
                if simpler < best[index] {
                    let mut made = best.clone();
                    made[index] = simpler;
                    if still(&made) {
                        best = made;
                        progress = true;
                        break;
                    }
                }
            }
        }
    }
    Choices::given(best)
}
