"""Python values to bytes and back, without running code that a sender chose.

Pure: no module here touches a socket, thread, clock or file, or knows frames and connections. A
function that decodes raises ``InvalidMessageError`` for bytes that no writer makes.
"""
