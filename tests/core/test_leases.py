from __future__ import annotations

from headgate.core.leases import LeaseTable


def test_a_lease_is_ended_once_and_only_by_its_own_generation():
    table = LeaseTable(generation=7)
    lease = table.grant([1, 2], until_s=10)
    assert table.end(lease.id, 6) == [] and table.end(99, 7) == []
    assert table.end(lease.id, 7) == [1, 2]
    assert table.end(lease.id, 7) == [] and len(table) == 0


def test_a_renewed_lease_lives_longer():
    table = LeaseTable(generation=7)
    kept, lost = table.grant([1], until_s=10), table.grant([2], until_s=10)
    assert table.renew(kept.id, 7, until_s=20)
    assert not table.renew(kept.id, 6, until_s=99)
    assert [lease.id for lease in table.expire(10)] == [lost.id]
    assert [lease.id for lease in table.expire(20)] == [kept.id]
