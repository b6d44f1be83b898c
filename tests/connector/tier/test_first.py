import pytest
from tests.connector.driving import TieredDriver
from tests.connector.copy_gate import GatePlan
from tests.connector.driving import STREAMS, hint
pytestmark=[pytest.mark.vllm, pytest.mark.timeout(120)]

def test_first():
    with TieredDriver(num_blocks=40) as d:
        a = d.run("a", STREAMS[0][:330], max_tokens=4, agent_hint=hint("s", ttl=60))
        print(d.call("get_session", tenant="", session_id="s"))
        r = d.wait("apply_edits", tenant="", session_id="s", edits=[{"type":"offload"}], wait_s=30)
        print(r)
        for i in range(1,4):
            d.run(f"f{i}", STREAMS[i][:500])
        print(d.call("get_session", tenant="", session_id="s"))
        r = d.wait("apply_edits", tenant="", session_id="s", edits=[{"type":"prefetch"}], wait_s=30)
        print(r)
        print(d.call("get_session", tenant="", session_id="s"))
        print(d.call("get_stats"))
        req = d.add("b", STREAMS[0][:330], max_tokens=4, agent_hint=hint("s", ttl=60))
        d.engine.run_until_idle()
        print(req.prefill_stats)
        d.check_no_leak()
def test_all():
    with TieredDriver(num_blocks=40, extra_config={"save_policy":"all"}) as d:
        d.run("a", STREAMS[0][:330], max_tokens=4)
        for i in range(1,4):
            d.run(f"f{i}", STREAMS[i][:500])
        req = d.add("b", STREAMS[0][:330], max_tokens=4)
        d.engine.run_until_idle()
        print(req.prefill_stats)
        print(d.call("get_stats"))
        d.check_no_leak()
def test_hinted():
    with TieredDriver(num_blocks=40) as d:
        d.run("a", STREAMS[0][:330], max_tokens=4, agent_hint=hint("s"))
        for i in range(1,4):
            d.run(f"f{i}", STREAMS[i][:500], max_tokens=30)
        req = d.add("b", STREAMS[0][:330], max_tokens=4)
        d.engine.run_until_idle()
        print(req.prefill_stats)
        print(d.call("get_stats"))
        d.check_no_leak()
