"""Numbers with their units, and names of nodes, as a person reads them."""

from steadfast.units import compact, duration, node_name, size


def test_numbers_and_nodes_in_words() -> None:
    assert [compact(v) for v in (0, 812, 39_812, 1.2e6)] == ["0", "812", "39.8k", "1.2M"]
    assert [size(v) for v in (0, 512, 2048, 3 * 2**40)] == ["0.0 B", "512.0 B", "2.0 KiB", "3072.0 GiB"]
    spans = [duration(v) for v in (0, 45.2, 221, 3200, 11_520)]
    assert spans == ["0s", "45s", "4m", "53m", "3h 12m"]
    assert node_name("0123456789abcdef" * 3 + "01234567") == "01234567"
    assert node_name("training-node-02.example.com") == "training-node-02.example.com"
