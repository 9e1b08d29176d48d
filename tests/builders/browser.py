"""Chromium without a window, for tests and pictures: Debian's chromium and chromium-driver, driven by selenium."""

import base64
import importlib.util
import shutil


def missing():
    """What is needed and not installed; empty if all of it is."""
    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return programs + ([] if importlib.util.find_spec("selenium") else ["selenium"])


def start():
    """A browser; the caller quits it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def set_media(browser, mode, media="screen"):
    """Sets "light" or "dark", and "screen" or "print"."""
    features = [{"name": "prefers-color-scheme", "value": mode}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def set_window(browser, width, height, scale=1):
    """Sets the size of the window in CSS pixels; a narrow one is that of a phone."""
    size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def screenshot(browser, *, whole):
    """A PNG of the window, or of the whole page."""
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole})
    return base64.b64decode(taken["data"])
