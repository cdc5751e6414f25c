"""What other threads tell the launcher runs on the launcher's thread."""

import selectors
import threading

from rankwire.transports.wakeup import Wakeup


def test_actions_run_in_order_where_the_selector_is_served():
    with selectors.DefaultSelector() as selector:
        wakeup = Wakeup(selector)
        ran = []

        def tell() -> None:
            for i in range(5000):
                wakeup.post(lambda i=i: ran.append((i, threading.current_thread())))

        thread = threading.Thread(target=tell)
        thread.start()
        while len(ran) < 5000:
            for key, _ in selector.select(5):
                key.data()
        thread.join()
        assert ran == [(i, threading.current_thread()) for i in range(5000)]
        wakeup.close()
        wakeup.post(lambda: ran.append("late"))
        assert not selector.get_map()
        assert len(ran) == 5000
