//! Who is served now and who waits: places for requests in flight, and a bounded line before them.
//!
//! The line is ordered by priority, then by arrival. Every fifth place that becomes free goes to whoever has waited longest, so that
//! urgent requests cannot keep the others waiting for ever: with n requests before it a request is served after at most 5·(n + 1)
//! others. When the line is full, a request that is more urgent than the last in line takes its place.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::counts::Counts;

/// Of so many places one goes to the request that has waited longest; as in the workers' schedulers.
const AGEING_PERIOD: u64 = 5;

/// Why a request gets no place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    #[error("{in_flight} requests are in flight and {waiting} wait, which is as many as may")]
    Full { in_flight: usize, waiting: usize },
    #[error("no place became free within {0:?}")]
    Late(Duration),
    #[error("no more requests are taken")]
    Closed,
}

impl NoPlace {
    /// As a metric label.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Full { .. } => "full",
            Self::Late(_) => "late",
            Self::Closed => "closed",
        }
    }
}

/// More urgent first, then older.
type Rank = (Reverse<i32>, u64);

/// Tells a request that its wait is over.
type Told = oneshot::Sender<Result<(), NoPlace>>;

/// Those in line. Every operation takes logarithmic time: it is done under the lock that every request takes.
#[derive(Debug, Default)]
struct Waiting {
    by_rank: BTreeMap<Rank, Told>,
    /// Priorities by arrival, of the same requests.
    by_arrival: BTreeMap<u64, i32>,
}

#[derive(Debug, Default)]
struct Line {
    taken: usize,
    waiting: Waiting,
    arrivals: u64,
    granted: u64,
    closed: bool,
}

/// See the module's text.
#[derive(Debug)]
pub struct Gate {
    places: usize,
    max_waiting: usize,
    patience: Duration,
    line: Mutex<Line>,
    counts: Counts,
}

/// A place. Dropping it gives it to the next in line.
#[derive(Debug)]
pub struct Place(Arc<Gate>);

/// A place in line. Dropping it leaves the line.
struct Waiter<'a> {
    gate: &'a Arc<Gate>,
    rank: Rank,
    told: oneshot::Receiver<Result<(), NoPlace>>,
    since: Instant,
    /// How the wait ended, as a metric label.
    outcome: &'static str,
}

impl Gate {
    /// `patience`: how long a request waits at most.
    pub fn new(places: usize, max_waiting: usize, patience: Duration, counts: Counts) -> Arc<Self> {
        Arc::new(Self {
            places,
            max_waiting,
            patience,
            line: Mutex::default(),
            counts,
        })
    }

    /// A place, at once or after a wait. The larger `priority` is, the more urgent. May be dropped while it waits.
    ///
    /// # Errors
    /// The line is full, the wait is over, or the gate is closed.
    pub async fn enter(self: &Arc<Self>, priority: i32) -> Result<Place, NoPlace> {
        let entered = self.enter_or_wait(priority).await;
        if let Err(reason) = entered {
            self.counts.no_place(reason);
        }
        entered.map(|()| Place(self.clone()))
    }

    async fn enter_or_wait(self: &Arc<Self>, priority: i32) -> Result<(), NoPlace> {
        let Some(mut waiter) = self.line_up(priority)? else {
            return Ok(());
        };
        let told = match tokio::time::timeout(self.patience, &mut waiter.told).await {
            Ok(Ok(told)) => told,
            // Whoever tells a waiter takes it out of the line first, so nobody is dropped without a word.
            Ok(Err(_)) => Err(NoPlace::Closed),
            Err(_) => Err(NoPlace::Late(self.patience)),
        };
        waiter.outcome = told.map_or_else(NoPlace::word, |()| "served");
        told
    }

    /// `None`: a place is free and taken.
    fn line_up(self: &Arc<Self>, priority: i32) -> Result<Option<Waiter<'_>>, NoPlace> {
        let mut line = self.line.lock();
        if line.closed {
            return Err(NoPlace::Closed);
        }
        if line.taken < self.places {
            line.taken += 1;
            return Ok(None);
        }
        if line.waiting.len() >= self.max_waiting {
            let full = NoPlace::Full {
                in_flight: self.places,
                waiting: self.max_waiting,
            };
            let last = line.waiting.last();
            match last.filter(|(Reverse(last), _)| *last < priority) {
                Some(last) => {
                    if let Some(told) = line.waiting.remove(last) {
                        let _ = told.send(Err(full));
                    }
                }
                None => return Err(full),
            }
        }
        line.arrivals += 1;
        let rank = (Reverse(priority), line.arrivals);
        let (sender, told) = oneshot::channel();
        line.waiting.insert(rank, sender);
        self.counts.in_line(line.waiting.len());
        Ok(Some(Waiter {
            gate: self,
            rank,
            told,
            since: Instant::now(),
            outcome: "left",
        }))
    }

    /// No request gets a place any more; those that wait are told. Those that have one keep it.
    pub fn close(&self) {
        let mut line = self.line.lock();
        line.closed = true;
        for told in line.waiting.take_all() {
            let _ = told.send(Err(NoPlace::Closed));
        }
        self.counts.in_line(0);
    }

    /// Requests that have a place, and that wait.
    pub fn counts(&self) -> (usize, usize) {
        let line = self.line.lock();
        (line.taken, line.waiting.len())
    }

    fn release(&self) {
        let mut line = self.line.lock();
        while let Some(rank) = line.next() {
            if let Some(told) = line.waiting.remove(rank)
                && told.send(Ok(())).is_ok()
            {
                line.granted += 1;
                self.counts.in_line(line.waiting.len());
                return;
            }
        }
        line.taken = line.taken.saturating_sub(1);
        self.counts.in_line(line.waiting.len());
    }
}

impl Line {
    fn next(&self) -> Option<Rank> {
        if (self.granted + 1).is_multiple_of(AGEING_PERIOD) {
            self.waiting.oldest()
        } else {
            self.waiting.most_urgent()
        }
    }
}

impl Waiting {
    fn len(&self) -> usize {
        self.by_rank.len()
    }

    fn insert(&mut self, rank: Rank, told: Told) {
        let (Reverse(priority), arrival) = rank;
        self.by_rank.insert(rank, told);
        self.by_arrival.insert(arrival, priority);
    }

    fn remove(&mut self, rank: Rank) -> Option<Told> {
        self.by_arrival.remove(&rank.1);
        self.by_rank.remove(&rank)
    }

    fn take_all(&mut self) -> impl Iterator<Item = Told> + use<> {
        self.by_arrival.clear();
        std::mem::take(&mut self.by_rank).into_values()
    }

    fn most_urgent(&self) -> Option<Rank> {
        self.by_rank.keys().next().copied()
    }

    fn last(&self) -> Option<Rank> {
        self.by_rank.keys().next_back().copied()
    }

    fn oldest(&self) -> Option<Rank> {
        let (arrival, priority) = self.by_arrival.first_key_value()?;
        Some((Reverse(*priority), *arrival))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.release();
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let counts = &self.gate.counts;
        {
            let mut line = self.gate.line.lock();
            line.waiting.remove(self.rank);
            counts.in_line(line.waiting.len());
        }
        counts.waited(self.outcome, self.since.elapsed());
        // Told in the same moment, and not heard: the place goes on to the next.
        self.told.close();
        if let Ok(Ok(())) = self.told.try_recv() {
            self.gate.release();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::FutureExt;
    use futures::future::BoxFuture;

    use super::*;

    const LONG: Duration = Duration::from_secs(3600);

    type Entering = BoxFuture<'static, Result<Place, NoPlace>>;

    /// Lines up, in this order.
    fn lined_up(gate: &Arc<Gate>, priority: i32) -> Entering {
        let gate = gate.clone();
        let mut entering = async move { gate.enter(priority).await }.boxed();
        assert!((&mut entering).now_or_never().is_none(), "it has to wait");
        entering
    }

    fn served(entering: &mut Entering) -> Option<Result<Place, NoPlace>> {
        entering.now_or_never()
    }

    #[tokio::test]
    async fn the_more_urgent_is_served_first_and_equals_in_the_order_of_arrival() {
        let gate = Gate::new(1, 10, LONG, Counts::default());
        let mut place = gate.enter(0).await.unwrap();
        let mut waiting: Vec<(&str, Entering)> = [("b", 0), ("d", -1), ("a", 5), ("c", 0)]
            .map(|(name, priority)| (name, lined_up(&gate, priority)))
            .into();
        let mut order = Vec::new();
        while !waiting.is_empty() {
            drop(place);
            let mut found = None;
            for (index, (_, entering)) in waiting.iter_mut().enumerate() {
                if let Some(entered) = served(entering) {
                    assert!(found.is_none(), "one place, one request");
                    found = Some((index, entered.unwrap()));
                }
            }
            let (index, entered) = found.unwrap();
            order.push(waiting.remove(index).0);
            place = entered;
        }
        assert_eq!(order, ["a", "b", "c", "d"]);
        drop(place);
        assert_eq!(gate.counts(), (0, 0));
    }

    #[tokio::test]
    async fn a_request_of_no_urgency_is_served_however_many_urgent_ones_come() {
        let gate = Gate::new(1, 10, LONG, Counts::default());
        let mut place = gate.enter(0).await.unwrap();
        let mut patient = lined_up(&gate, -100);
        let mut before = 0;
        loop {
            // There is always an urgent one in line.
            let mut urgent = lined_up(&gate, 100);
            drop(place);
            if let Some(entered) = served(&mut patient) {
                entered.unwrap();
                break;
            }
            place = served(&mut urgent).unwrap().unwrap();
            before += 1;
            assert!(before < 100, "it starves");
        }
        assert_eq!(before, AGEING_PERIOD - 1);
    }

    #[tokio::test]
    async fn a_full_line_takes_only_who_is_more_urgent_than_its_last() {
        let gate = Gate::new(1, 2, LONG, Counts::default());
        let place = gate.enter(0).await.unwrap();
        let (mut first, mut last) = (lined_up(&gate, 0), lined_up(&gate, 0));
        let full = NoPlace::Full {
            in_flight: 1,
            waiting: 2,
        };
        assert_eq!(gate.enter(0).await.unwrap_err(), full);
        let mut urgent = lined_up(&gate, 1);
        assert_eq!(served(&mut last).unwrap().unwrap_err(), full);
        drop(place);
        assert!(served(&mut first).is_none());
        drop(served(&mut urgent).unwrap().unwrap());
        served(&mut first).unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_longer_than_said() {
        let gate = Gate::new(1, 10, Duration::from_secs(7), Counts::default());
        let _place = gate.enter(0).await.unwrap();
        let began = Instant::now();
        let refused = gate.enter(0).await.unwrap_err();
        assert_eq!(refused, NoPlace::Late(Duration::from_secs(7)));
        assert_eq!(began.elapsed().as_secs(), 7);
        assert_eq!(gate.counts(), (1, 0));
    }

    #[tokio::test]
    async fn who_leaves_the_line_is_passed_over_even_in_the_moment_of_its_turn() {
        let gate = Gate::new(1, 10, LONG, Counts::default());
        let place = gate.enter(0).await.unwrap();
        let (gone, told, mut next) = (lined_up(&gate, 0), lined_up(&gate, 0), lined_up(&gate, 0));
        drop(gone);
        // It has its turn and does not hear of it.
        drop(place);
        assert!(served(&mut next).is_none());
        drop(told);
        let place = served(&mut next).unwrap().unwrap();
        assert_eq!(gate.counts(), (1, 0));
        drop(place);
        assert_eq!(gate.counts(), (0, 0));
    }

    #[tokio::test]
    async fn a_closed_gate_sends_those_in_line_away_and_lets_those_inside_go_on() {
        let gate = Gate::new(1, 10, LONG, Counts::default());
        let place = gate.enter(0).await.unwrap();
        let mut waiting = lined_up(&gate, 0);
        gate.close();
        assert_eq!(served(&mut waiting).unwrap().unwrap_err(), NoPlace::Closed);
        assert_eq!(gate.enter(9).await.unwrap_err(), NoPlace::Closed);
        assert_eq!(gate.counts(), (1, 0));
        drop(place);
        assert_eq!(gate.counts(), (0, 0));
    }

    #[tokio::test]
    async fn no_place_is_lost_or_made_under_contention() {
        let gate = Gate::new(3, 100, LONG, Counts::default());
        let enter = |index: i32| {
            let gate = gate.clone();
            tokio::spawn(async move {
                let mut entering = pin!(gate.enter(index % 4));
                // One in three gives up after a moment.
                let entered = if index % 3 == 0 {
                    tokio::select! {
                        biased;
                        entered = &mut entering => entered.ok(),
                        () = tokio::task::yield_now() => None,
                    }
                } else {
                    entering.await.ok()
                };
                assert!(gate.counts().0 <= 3);
                tokio::task::yield_now().await;
                drop(entered);
            })
        };
        let tasks: Vec<_> = (0..90).map(enter).collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(gate.counts(), (0, 0));
        assert_eq!(gate.line.lock().waiting.by_arrival.len(), 0);
    }
}
