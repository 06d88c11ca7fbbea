//! Which window of the ladder is best for a load that is not known.

use super::score::Mean;

/// Rounds before the first window may be dropped, and at most.
const ROUNDS_MIN: usize = 3;
const ROUNDS_MAX: usize = 8;
/// A window is dropped when it is worse than the best by so many standard errors.
const SURE: f64 = 2.5;
/// Differences of score that do not matter.
pub(super) const SAME: f64 = 0.01;

/// A scan under way: in each round every window that is left has an epoch, in turn forwards and
/// backwards, so that a load that drifts favours none.
#[derive(Debug)]
pub(super) struct Scan {
    /// The one that held before.
    incumbent: usize,
    /// Scores of each window by round; those dropped have fewer.
    scores: Vec<Vec<f64>>,
    /// Those left, in the order of this round.
    left: Vec<usize>,
    turn: usize,
    rounds: usize,
}

impl Scan {
    /// A scan of so many windows; it begins with the incumbent's end of the ladder.
    pub(super) fn new(windows: usize, incumbent: usize) -> Self {
        let mut left: Vec<usize> = (0..windows).collect();
        if incumbent * 2 >= windows {
            left.reverse();
        }
        Scan {
            incumbent,
            scores: vec![Vec::new(); windows],
            left,
            turn: 0,
            rounds: 0,
        }
    }

    pub(super) fn incumbent(&self) -> usize {
        self.incumbent
    }

    pub(super) fn first(&self) -> usize {
        self.left[0]
    }

    /// The window whose turn it was had this score. Which is next; or, as an error, the winner.
    pub(super) fn add(&mut self, score: f64) -> Result<usize, usize> {
        self.scores[self.left[self.turn]].push(score);
        self.turn += 1;
        if self.turn == self.left.len() {
            self.turn = 0;
            self.rounds += 1;
            if self.rounds >= ROUNDS_MIN {
                let best = self.best();
                self.drop_worse(best);
                if self.left.len() <= 1 || self.rounds >= ROUNDS_MAX || self.all_same(best) {
                    return Err(self.winner(best));
                }
            }
            self.left.reverse();
        }
        Ok(self.left[self.turn])
    }

    fn best(&self) -> usize {
        let mean = |place: &usize| {
            let scores = &self.scores[*place];
            scores.iter().sum::<f64>()
        };
        let best = self.left.iter().max_by(|a, b| mean(a).total_cmp(&mean(b)));
        best.copied().unwrap_or(self.incumbent)
    }

    /// By how much `place` is better than `best`, round by round.
    fn against(&self, place: usize, best: usize) -> Mean {
        let mut mean = Mean::default();
        let rounds = self.scores[place].iter().zip(&self.scores[best]);
        rounds.for_each(|(score, best)| mean.add(score - best));
        mean
    }

    fn drop_worse(&mut self, best: usize) {
        let worse = |place: usize| {
            let mean = self.against(place, best);
            mean.mean() < -SAME && mean.mean() < -SURE * mean.error()
        };
        let left = self.left.iter().copied();
        self.left = left
            .filter(|place| *place == best || !worse(*place))
            .collect();
    }

    /// Whether all that are left are as good as the best, as far as it matters.
    fn all_same(&self, best: usize) -> bool {
        let same = |place: &usize| {
            let mean = self.against(*place, best);
            mean.mean() - SURE * mean.error() > -2.0 * SAME
        };
        self.left.iter().all(|place| *place == best || same(place))
    }

    /// The best one, unless the incumbent is as good.
    fn winner(&self, best: usize) -> usize {
        let incumbent = self.incumbent;
        let mean = self.against(incumbent, best);
        let stays = self.left.contains(&incumbent)
            && (incumbent == best || mean.mean() > -SAME - mean.error());
        if stays { incumbent } else { best }
    }
}
