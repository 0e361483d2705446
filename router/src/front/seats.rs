//! Connections at a time. The one that has been idle longest makes room for a new one, so that idle clients cannot shut others out.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::counts::Counts;

/// Since when it is idle; numbers tell connections of the same moment apart.
type Idleness = (Instant, u64);

#[derive(Debug, Default)]
struct State {
    taken: usize,
    arrivals: u64,
    idle: BTreeMap<Idleness, CancellationToken>,
}

/// A bounded number of seats.
#[derive(Debug)]
pub struct Seats {
    most: usize,
    state: Mutex<State>,
    counts: Counts,
}

/// A connection's seat. Idle until it is [`Seat::busy`]. Dropping it frees it.
#[derive(Debug)]
pub struct Seat {
    seats: Arc<Seats>,
    number: u64,
    /// Cancelled when another connection takes the seat.
    pub given_up: CancellationToken,
    idle: Mutex<Option<Idleness>>,
}

/// A request that its connection serves. Dropping it leaves the connection idle.
#[derive(Debug)]
pub struct Busy(Arc<Seat>);

impl Seats {
    pub fn new(most: usize, counts: Counts) -> Arc<Self> {
        Arc::new(Self {
            most,
            state: Mutex::default(),
            counts,
        })
    }

    /// A seat for a new connection, if need be that of an idle one. `None`: all are busy.
    pub fn take(self: &Arc<Self>) -> Option<Arc<Seat>> {
        let mut state = self.state.lock();
        if state.taken >= self.most && !self.send_away(&mut state) {
            self.counts.connection("refused");
            return None;
        }
        self.counts.connection("accepted");
        state.taken += 1;
        state.arrivals += 1;
        let seat = Seat {
            seats: self.clone(),
            number: state.arrivals,
            given_up: CancellationToken::new(),
            idle: Mutex::default(),
        };
        state.sit_idle(&seat);
        self.tell(&state);
        Some(Arc::new(seat))
    }

    /// Closes the connection that is idle longest. False: none is.
    pub fn send_one_away(&self) -> bool {
        let mut state = self.state.lock();
        let sent = self.send_away(&mut state);
        self.tell(&state);
        sent
    }

    fn send_away(&self, state: &mut State) -> bool {
        let sent = state.send_one_away();
        if sent {
            self.counts.connection("displaced");
        }
        sent
    }

    fn tell(&self, state: &State) {
        self.counts.connections(state.taken, state.idle.len());
    }

    /// Closes every idle connection.
    pub fn send_idle_away(&self) {
        let mut state = self.state.lock();
        while state.send_one_away() {}
        self.tell(&state);
    }
}

impl State {
    fn send_one_away(&mut self) -> bool {
        let Some((_, given_up)) = self.idle.pop_first() else {
            return false;
        };
        given_up.cancel();
        // Its task has yet to end, but the seat is given.
        self.taken = self.taken.saturating_sub(1);
        true
    }

    fn sit_idle(&mut self, seat: &Seat) {
        if seat.given_up.is_cancelled() {
            return;
        }
        let since = (Instant::now(), seat.number);
        self.idle.insert(since, seat.given_up.clone());
        *seat.idle.lock() = Some(since);
    }

    fn rise(&mut self, seat: &Seat) {
        if let Some(since) = seat.idle.lock().take() {
            self.idle.remove(&since);
        }
    }
}

impl Seat {
    /// A request has come.
    pub fn busy(self: &Arc<Self>) -> Busy {
        let mut state = self.seats.state.lock();
        state.rise(self);
        self.seats.tell(&state);
        drop(state);
        Busy(self.clone())
    }

    /// Its client did not take what was written, or has not been heard of for as long.
    pub(super) fn stalled(&self) {
        self.seats.counts.connection("stalled");
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let seats = &self.0.seats;
        let mut state = seats.state.lock();
        state.sit_idle(&self.0);
        seats.tell(&state);
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut state = self.seats.state.lock();
        state.rise(self);
        if !self.given_up.is_cancelled() {
            state.taken = state.taken.saturating_sub(1);
        }
        self.seats.tell(&state);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn later() {
        tokio::time::advance(Duration::from_secs(1)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_connection_that_is_idle_longest_gives_up_its_seat() {
        let seats = Seats::new(3, Counts::default());
        let first = seats.take().unwrap();
        later().await;
        let second = seats.take().unwrap();
        later().await;
        let third = seats.take().unwrap();
        later().await;
        // The first has served a request meanwhile, so it is not the one that is idle longest.
        drop(first.busy());
        later().await;
        let fourth = seats.take().unwrap();
        assert!(second.given_up.is_cancelled());
        drop(second);
        let _fifth = seats.take().unwrap();
        assert!(third.given_up.is_cancelled());
        assert!(!first.given_up.is_cancelled() && !fourth.given_up.is_cancelled());
    }

    #[tokio::test]
    async fn a_burst_sends_no_more_away_than_it_needs() {
        let seats = Seats::new(2, Counts::default());
        let old = [seats.take().unwrap(), seats.take().unwrap()];
        // Nobody who was sent away has left yet.
        let new = [seats.take().unwrap(), seats.take().unwrap()];
        assert!(old.iter().all(|seat| seat.given_up.is_cancelled()));
        assert!(new.iter().all(|seat| !seat.given_up.is_cancelled()));
        drop(old);
        let busy = new.each_ref().map(Seat::busy);
        assert!(seats.take().is_none());
        drop((busy, new));
        assert_eq!(seats.state.lock().taken, 0);
    }

    #[tokio::test]
    async fn busy_connections_are_not_sent_away() {
        let seats = Seats::new(2, Counts::default());
        let (one, other) = (seats.take().unwrap(), seats.take().unwrap());
        let busy = (one.busy(), other.busy());
        assert!(seats.take().is_none());
        drop(busy.1);
        assert!(seats.take().is_some());
        assert!(other.given_up.is_cancelled() && !one.given_up.is_cancelled());
    }

    #[tokio::test]
    async fn a_seat_is_free_when_its_connection_has_ended() {
        let seats = Seats::new(1, Counts::default());
        for _ in 0..3 {
            let seat = seats.take().unwrap();
            drop(seat.busy());
            drop(seat);
        }
        let state = seats.state.lock();
        assert_eq!((state.taken, state.idle.len()), (0, 0));
    }
}
