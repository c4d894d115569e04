//! How far a publisher has come, to the event: the last commit that it has whole, and how much of the next.
//!
//! At-least-once needs only the commit, since a piece of one may come twice. Exactly-once puts this beside the records
//! into one Kafka transaction, and of a commit that is larger than a transaction skips what is there already when the
//! commit is read again.

use serde::{Deserialize, Serialize};

use crate::event::{Chunk, CommitId};
use crate::position::Position;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Milestone {
    pub position: Position,
    pub within: Option<Within>,
}

/// A piece of a commit, from its beginning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Within {
    /// As messages name it.
    pub commit: String,
    /// Events of it that the source has given, whether they were wanted or not.
    pub events: u64,
}

impl Milestone {
    pub fn at(position: Position) -> Self {
        Milestone { position, within: None }
    }

    /// Moves past a chunk.
    pub fn pass(&mut self, chunk: &Chunk) {
        if let Some(end) = &chunk.end {
            self.position = end.position.clone();
            self.within = None;
        }
        let Some(last) = chunk.events().last() else { return };
        let commit = chunk.commit(last).id;
        if !comes_in_pieces(&commit) || self.position.has(&commit) {
            return;
        }
        let of_it = chunk.events().iter().rev().take_while(|event| chunk.commit(event).id == commit).count() as u64;
        let commit = commit.to_string();
        match &mut self.within {
            Some(within) if within.commit == commit => within.events += of_it,
            within => *within = Some(Within { commit, events: of_it }),
        }
    }
}

impl Within {
    /// Whether an event of the commit is part of this piece; counts it off.
    pub fn has(&mut self, commit: &CommitId) -> bool {
        if self.events == 0 || !self.is_of(commit) {
            return false;
        }
        self.events -= 1;
        true
    }

    pub fn is_of(&self, commit: &CommitId) -> bool {
        commit.to_string() == self.commit
    }
}

/// Of the others every event is a position of its own.
fn comes_in_pieces(commit: &CommitId) -> bool {
    matches!(commit, CommitId::Postgres(_) | CommitId::MySql { .. } | CommitId::MariaDb(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Commit, CommitEnd, Micros};
    use crate::position::Lsn;

    /// Events of commits at these positions, and where the last whole one of them ends.
    fn chunk(commits: &[(u64, usize)], end: Option<u64>) -> Chunk {
        let mut chunk = Chunk::default();
        chunk.reset(1);
        for (lsn, events) in commits {
            chunk.begin_commit(Commit { id: CommitId::Postgres(Lsn(*lsn)), committed_at: Micros(0) });
            for _ in 0..*events {
                chunk.push_event(0);
            }
        }
        chunk.end = end.map(|lsn| CommitEnd { position: Position::Postgres(Lsn(lsn)), committed_at: Micros(0) });
        chunk
    }

    fn within(commit: u64, events: u64) -> Option<Within> {
        Some(Within { commit: Lsn(commit).to_string(), events })
    }

    #[test]
    fn pieces_of_a_commit_are_counted_from_its_beginning() {
        let mut milestone = Milestone::at(Position::Postgres(Lsn(10)));
        milestone.pass(&chunk(&[(20, 1), (30, 2)], Some(25)));
        assert_eq!((&milestone.position, milestone.within.clone()), (&Position::Postgres(Lsn(25)), within(30, 2)));
        milestone.pass(&chunk(&[(30, 5)], None));
        assert_eq!(milestone.within, within(30, 7));
        milestone.pass(&chunk(&[(30, 1)], Some(35)));
        assert_eq!(milestone, Milestone::at(Position::Postgres(Lsn(35))));
        milestone.pass(&chunk(&[], Some(90)));
        assert_eq!(milestone, Milestone::at(Position::Postgres(Lsn(90))));
    }

    #[test]
    fn what_was_delivered_of_a_commit_is_skipped_when_it_is_read_again_in_other_pieces() {
        let mut piece = within(30, 7).unwrap();
        let mut skipped = |chunk: &Chunk| {
            let events = chunk.events().iter();
            events.filter(|event| piece.has(&chunk.commit(event).id)).count()
        };
        assert_eq!(skipped(&chunk(&[(20, 2), (30, 4)], None)), 4);
        assert_eq!(skipped(&chunk(&[(30, 4), (40, 1)], Some(45))), 3);
        assert_eq!(skipped(&chunk(&[(30, 4)], None)), 0);
    }
}
